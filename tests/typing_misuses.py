"""Mistakes. mypy and pyright find one in each line from "Choices and names" on; see `typing_uses`."""

import fastattn
from fastattn.layers import MultiHeadAttention
from fastattn.masks import Causal, Window

x = [[1.0]]
cache = fastattn.KVCache(1, 2, 4)
layer = MultiHeadAttention(x, x, x, x, num_heads=1)

# Choices and names.
fastattn.attention(x, x, x, causal="topleft")
fastattn.attention(x, x, x, layout="sbhd")
fastattn.attention(x, x, x, backend="Cython")
fastattn.attention(x, x, x, return_weights="max")
fastattn.attention(x, x, x, attn_mask=x)
fastattn.attention(x, x, x, Causal())
fastattn.varlen_attention(x, x, x, [0, 1], key_lengths=[1])
fastattn.flex_attention(x, x, x, attn_mask=x)
fastattn.flex_attention(x, x, x, block_mask=x)
fastattn.scaled_dot_product_attention(x, x, x, mask=x)
fastattn.attention_backward(x, x, x, x, x, [1.0], return_lse=True)
fastattn.attention_backward(x, x, x, x, x, [1.0], wrt=3)
fastattn.varlen_attention_backward(x, x, x, x, x, x, [0, 1], key_lengths=[1])
fastattn.flex_attention_backward(x, x, x, x, x, [1.0], score_grad=x)
fastattn.varlen_attention_backward(x, x, x, x, x, x)
fastattn.gated_linear_attention_backward(x, x, x, x, return_state=True)
fastattn.rope(x, x, x, position_ids=[0])
fastattn.rope_tables(3, 4, theta=1e4)
fastattn.linear_attention(x, x, x, eps=1e-6)
fastattn.kernel_regression(x, x, x)
fastattn.kernel_regression(x, x, x, bandwidth=1.0, gamma=1.0)
fastattn.KVCache(batch_size=1, num_kv_heads=2, head_dim=4)
cache.append(x, x, seq_lens=[1])
cache.attend(x, is_causal=True)
cache.attend(x, causal="top_left")
cache.step(x, x, x, key_lengths=[1])
cache.step(x, x, x, window=3)
layer(x, need_weights=True)
layer(x, return_weights="max")
Causal("left")
Window(1, 1, align="middle")
print(Causal() & None)

# What is returned.
fastattn.attention(x, x, x, return_lse=True).sum()
fastattn.attention(x, x, x, return_weights="mean").sum()
fastattn.varlen_attention(x, x, x, [0, 1], return_lse=True).sum()
fastattn.kernel_regression(x, x, x, bandwidth=1.0, return_log_density=True).sum()
fastattn.linear_attention(x, x, x, return_state=True).sum()
fastattn.attention_backward(x, x, x, x, x, [1.0]).bias.sum()
fastattn.attention_backward(x, x, x, x, x, [1.0], wrt="key").query.sum()
fastattn.varlen_attention_backward(x, x, x, x, x, x, [0, 1]).bias.sum()
fastattn.flex_attention_backward(x, x, x, x, x, [1.0]).aux[0]
cache.attend(x, return_lse=True).sum()
cache.step(x, x, x, return_weights=True).sum()
layer(x, return_weights="mean").sum()
