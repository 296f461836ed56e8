"""Attention kernels with their log-sum-exp, which the public call does not return. torch 2.11 to 2.15."""

import torch

cpu_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""(q, k, v, dropout, causal, attn_mask) → out and log-sum-exp; heads before tokens."""
cpu_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
"""Gradients of q, k and v from out and log-sum-exp."""
varlen_flash = torch.ops.aten._flash_attention_forward
"""CUDA, 16-bit: sequences of unequal lengths, packed."""
varlen_flash_backward = torch.ops.aten._flash_attention_backward
cudnn_attention = torch.ops.aten._scaled_dot_product_cudnn_attention
"""CUDA, 16-bit: (q, k, v, bias, with log-sum-exp, dropout, causal, with mask) → out, log-sum-exp (B, H, S, 1), two
empty boundaries, two lengths, two numbers of a generator; heads before tokens."""
cudnn_attention_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
"""Gradients of q, k and v from out and log-sum-exp."""
