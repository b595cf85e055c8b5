"""Whether this computer is faster in bfloat16, for training and for inference.

On a CPU, a child process runs the trial, because some hosts advertise instructions that end a process with SIGILL. The
child runs this file as a script, so that it imports only PyTorch.
"""

import collections
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path


INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16", "svebf16")  # as Linux names them, on x86 and ARM
ROUNDS = 5
MAX_ROWS = 8192  # of a matrix in the trial, so that it takes a second at most


def choose_precision(
    batch_size: int, tokens: int, width: int, heads: int, threads: int, training: bool = True
) -> tuple[str, str]:
    """`bf16` where it is faster than float32, else `no`, and why: accelerate's words for `mixed_precision`.

    On a CPU the trial is a transformer block on `batch_size` sequences of `tokens` tokens: a training step with
    autocast, or without `training` a forward pass with weights in bfloat16. An accelerator is asked whether it has
    bfloat16.
    """
    import torch

    if torch.cuda.is_available():
        return ("bf16", "the GPU has it") if torch.cuda.is_bf16_supported() else ("no", "the GPU has no bfloat16")
    if torch.accelerator.is_available():
        return "no", "not tried on this accelerator"
    if not has_instructions():
        return "no", "the CPU has no instructions for bfloat16"
    batch_size = max(1, min(batch_size, MAX_ROWS // tokens))
    shapes = {"batch_size": batch_size, "tokens": tokens, "width": width, "heads": heads, "threads": threads}
    shapes["training"] = training
    # Not `python -m`: that would import this package, and Transformers with it.
    child = subprocess.run([sys.executable, __file__, json.dumps(shapes)], capture_output=True, text=True)
    if child.returncode < 0:
        return "no", f"bfloat16 ends a process with signal {-child.returncode} on this CPU"
    if child.returncode > 0:
        return "no", "the trial of bfloat16 failed"
    seconds = json.loads(child.stdout)
    times = f"{1000 * seconds['float32']:.0f} ms in float32, {1000 * seconds['bfloat16']:.0f} ms in bfloat16"
    return "bf16" if seconds["bfloat16"] < seconds["float32"] else "no", f"by trial, a block takes {times}"


def choose_dtype(network, batch_size: int, threads: int) -> tuple[str, str]:
    """`bfloat16` where the weights of a network are faster in it, else `float32`, and why.

    The trial uses the most common width of the network's linear layers, and sequences of 64 tokens.
    """
    import torch

    widths = collections.Counter(
        module.in_features for module in network.modules() if isinstance(module, torch.nn.Linear)
    )
    if not widths:
        return "float32", "the network has no linear layers to try"
    width = widths.most_common(1)[0][0]
    heads = next(heads for heads in range(max(1, width // 64), 0, -1) if width % heads == 0)
    precision, reason = choose_precision(batch_size, 64, width, heads, threads, training=False)
    return ("bfloat16" if precision == "bf16" else "float32"), reason


def has_instructions() -> bool:
    """Whether the CPU has instructions for bfloat16; true if the system does not say, so that the trial decides."""
    if platform.system() != "Linux":
        return True
    flags = Path("/proc/cpuinfo").read_text().split()
    return any(name in flags for name in INSTRUCTIONS)


def time_block(
    batch_size: int, tokens: int, width: int, heads: int, threads: int, training: bool = True
) -> dict[str, float]:
    """Median seconds of a block by precision, measured in turns; with eager attention, as on a CPU in bfloat16."""
    import torch

    torch.set_num_threads(threads)
    torch.set_grad_enabled(training)
    block = torch.nn.ModuleList([torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)])
    block.append(
        torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width))
    )
    inputs = torch.randn(batch_size, tokens, width)
    seconds: dict[str, list[float]] = {"float32": [], "bfloat16": []}
    for _ in range(ROUNDS + 1):
        for name, measured in seconds.items():
            if not training:
                block, inputs = block.to(getattr(torch, name)), inputs.to(getattr(torch, name))
            start = time.perf_counter()
            with torch.autocast("cpu", torch.bfloat16, enabled=training and name == "bfloat16"):
                query, key, value = block[0](inputs).unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
                weights = (query @ key.transpose(2, 3) * (width // heads) ** -0.5).softmax(dim=-1)
                hidden = inputs + block[1]((weights.to(value.dtype) @ value).transpose(1, 2).flatten(2))
                loss = (hidden + block[2](hidden)).float().square().mean()
            if training:
                loss.backward()
            measured.append(time.perf_counter() - start)
    return {name: statistics.median(measured[1:]) for name, measured in seconds.items()}  # the first warms up


if __name__ == "__main__":
    print(json.dumps(time_block(**json.loads(sys.argv[1]))))
