"""Quantised weights: the two formats, how a checkpoint says which module has which, and the program that writes them.

A linear layer computes y = x W^T with W [N, K] (N outputs, K inputs). Both formats store W row-major, blocks along K.

NVFP4 (`nvfp4.py`), 4.5 bits a weight:
    packed        uint8 [N, K / 2]: two e2m1 codes a byte, the even column in the low nibble, the odd one in the high.
                  A code is sign (bit 3), exponent (bits 2-1), mantissa (bit 0): 0, 0.5, 1, 1.5, 2, 3, 4, 6.
    scales        float8_e4m3fn [N, K / 16]: one for 16 neighbouring columns, positive, row-major, not swizzled.
    global_scale  fp32 scalar: W = e2m1 * scale * global_scale.
    input_scale   fp32 scalar or None: the same factor for activations where those are FP4 too (amax / 2688).
    Stored by ModelOpt as `weight`, `weight_scale`, `weight_scale_2`, `input_scale`; by compressed-tensors
    (`nvfp4-pack-quantized`) as `weight_packed`, `weight_scale`, `weight_global_scale` and `input_global_scale`, the
    last two as reciprocals, of shape [1].

FP8 block (`fp8.py`), 8 bits a weight:
    weight        float8_e4m3fn [N, K].
    scales        fp32 [ceil(N / 128), ceil(K / 128)]: W = weight * scale of its 128 x 128 block. Edge blocks may be
                  smaller in this format; vLLM wants whole ones.
    Stored as `weight` and `weight_scale_inv`. Activations are quantised at run time, per token and 128 columns.

Layers that an engine runs as one matrix product (q, k, v; gate, up; qkv, z of Gated DeltaNet) share their global scale
and their input scale: `grouping.py`.
"""
