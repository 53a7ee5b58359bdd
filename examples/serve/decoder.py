"""A decoder of one's own in two stages, with random weights."""

from pathlib import Path

import torch

from multiworld.serve import Generation, Model, Stage
from multiworld.serve.text.tokenizer import Tokenizer

WORDS = 49_152


class Layer(torch.nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number = number
        self.mix, self.out = torch.nn.Linear(64, 192), torch.nn.Linear(64, 64)

    def forward(self, x, attention):
        query, key, value = self.mix(x).view(len(x), 3, 4, 16).permute(1, 2, 0, 3)
        return x + self.out(attention.attend(self.number, query, key, value).flatten(1))


def front(context):
    torch.manual_seed(0)  # all replicas of a stage need the same weights
    words, places = torch.nn.Embedding(WORDS, 64), torch.nn.Embedding(256, 64)
    layer = Layer(0)
    return lambda rows, at, attention, wanted: layer(
        words(rows) + places(at), attention
    )


def back(context):
    torch.manual_seed(1)
    layer, head = Layer(1), torch.nn.Linear(64, WORDS)
    return lambda rows, at, attention, wanted: head(layer(rows, attention)[wanted])


def model(folder):
    facts = Generation(
        tokenizer=lambda: Tokenizer(Path(folder).expanduser()),
        end_tokens=(0,),
        vocabulary=WORDS,
        max_tokens=256,
        kv_bytes=[512, 512],
    )
    return Model(stages=[Stage(load=front), Stage(load=back)], generation=facts)
