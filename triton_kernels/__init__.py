"""Kernels of the learner: pure functions of tensors, imported as `asyncrl.triton_kernels`.

The bare name `triton_kernels` belongs to another package, which vLLM imports for its MoE layers; this
folder must not be mistaken for it.
"""

if __name__ == "triton_kernels":
    raise ImportError("this folder is `asyncrl.triton_kernels`; the bare name belongs to another package")
