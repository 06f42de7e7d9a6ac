"""What messages say to users of other libraries: which argument here takes the place of theirs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from fastattn.masks import Mask
from fastattn.masks.arguments import has_zeros_and_ones

#: What to say instead of the arguments of other libraries, or of other functions here. A row has the names of
#: arguments and their answers, ``needed | say``. `needed` are the parameters that a function must have for
#: the answer, or its name. A name may be in several rows; the first answer that fits is given. Each ``name=``
#: in an answer is a parameter of the function; NAME is the argument itself. Where libraries differ, as in
#: what True means in a mask, the answer names the library. An answer is indented by 4, its further lines by
#: 8.
_ROWS = """
# Masks and what is added to scores
attention_mask key_padding_mask value_mask key_mask padding_mask query_mask query_seq_lengths query_lengths
        q_lengths seqused_q
    cu_seqlens_q | leave the padding out of the packed arrays
attn_mask
    attention | say mask= for a bool mask (True = may attend) and bias= for a float one (added to the scores),
        or call fastattn.scaled_dot_product_attention, which has PyTorch's arguments and conventions
    cache mask bias | say mask=~attn_mask for a bool one, as True means ignore in torch.nn.MultiheadAttention
        and may attend here, and bias= for a float one (added to the scores)
    mask bias | say mask= for a bool mask (True = may attend) and bias= for a float one (added to the scores)
attention_mask encoder_attention_mask
    mask bias | say mask=NAME[:, None, None, :] for one of (B, S) and mask=NAME[:, None] for one of (B, L, S),
        bool or integer (non-zero = may attend), and bias= for a float one that is added to the scores
    attn_mask | say attn_mask=NAME[:, None, None, :] != 0 for one of (B, S) (True = may attend)
key_padding_mask value_mask key_mask padding_mask
    key_lengths mask | say key_lengths= where the padding stands at the end, or mask=~NAME[:, None, None, :]
        where True means ignore, as in torch.nn.MultiheadAttention, and without ~ where it means keep
    mask | say mask=~NAME[:, None, None, :] where True means ignore, as in torch.nn.MultiheadAttention, and
        without ~ where it means keep
    attn_mask | say attn_mask=~NAME[:, None, None, :] where True means ignore, as in
        torch.nn.MultiheadAttention, and without ~ where it means keep
attention_mask encoder_attention_mask key_padding_mask value_mask key_mask padding_mask
    key lengths | say lengths=, how many of the new rows are tokens, as the padding has to stand at the end
    key_lengths | say key_lengths=, as the padding has to stand at the end
query_mask query_seq_lengths query_lengths q_lengths seqused_q
    causal window | leave it out: rows of padding among the queries change no other row; with
        causal="bottom_right" they have to stand at the beginning
    query | leave it out: rows of padding among the queries change no other row
mask
    attn_mask | say attn_mask=, bool (True = may attend) or float (added to the scores)
custom_mask where | mask | say mask=, where True means may attend
attention_chunk
    mask | say mask=fastattn.masks.Segments((np.arange(L) + S - L) // NAME, np.arange(S) // NAME), with
        causal= as it is
cache_leftpad leftpad_k
    mask | say mask=np.arange(S) >= NAME[:, None, None, None]
cache_batch_idx | key | leave it out, and give key[cache_batch_idx] and value[cache_batch_idx]
block_mask | mask | say mask=, which takes block masks, too
mask_mod mask_fn mask_function
    mask_mod | say mask_mod=
    mask | say mask=fastattn.create_block_mask(NAME, B, H, L, S)
score_mod score_fn
    score_mod | say score_mod=
    grad_out | call fastattn.flex_attention_backward, which takes it
    query | call fastattn.flex_attention, which takes it
attn_bias attention_bias
    bias causal | say bias= for an array (added to the scores), and causal=True for a LowerTriangularMask
position_bias relative_position_bias rel_pos_bias | bias | say bias=
attn_bias attention_bias position_bias relative_position_bias rel_pos_bias bias
    attn_mask | say attn_mask=, as a float one is added to the scores
alibi_slopes
    score_mod | say score_mod=, a function that gives score - slopes[h] * abs(q_idx + S - L - kv_idx)
    cu_seqlens_q | say bias=-alibi_slopes[..., None, None] * abs(p[:, None] - r), where p and r are the
        positions of the packed queries and keys in their documents
    bias | say bias=-alibi_slopes[..., None, None] * abs(np.arange(L)[:, None] + S - L - np.arange(S))
bias use_bias | MultiHeadAttention | say b_q=, b_k=, b_v= and b_o=, the arrays
mask_filter_value | query | leave it out: a masked key is never seen
head_mask layer_head_mask
    MultiHeadAttention.__call__ | leave it out, and multiply each head's rows of w_o by it
    grad_out | leave it out, and multiply the heads of grad_out by it
    query | leave it out, and multiply the heads of the result by it
# Causal masks and windows
is_causal use_causal_mask unidirectional
    KVCache.attend | leave it out for causal attention, and say causal=False for cross attention
    feature_map causal | say causal=True
    causal | say causal=True, or causal="top_left" where L != S, as PyTorch does
    is_causal | say is_causal=True
causal | is_causal | say is_causal=True, which is top left, or call fastattn.attention
window_size local_window_size sliding_window
    KVCache | say window=, how many keys a query sees, its own among them
window_size | window | say window=(left, right), both included as in flash-attn, with None in the place of -1
window_left
    KVCache | say window=window_left + 1, how many keys a query sees, its own among them
    window | say window=(window_left, None), included as in FlashInfer, with None in the place of -1
local_window_size
    mask window | say window=(left, right), both included as in JAX, where one number w stands for (w, w), and
        where L != S mask=fastattn.masks.Window(left, right, "top_left")
    window | say window=(left, right), both included as in JAX, where one number w stands for (w, w)
sliding_window
    window | say window=(sliding_window - 1, 0), or (sliding_window - 1, sliding_window - 1) in both
        directions, as the token itself counts there
# Numbers
softmax_scale sm_scale scaling attn_scale | scale | say scale=
use_scale | scale | say scale=1.0 for False; True is a number that was learned
score_mode | query | leave it out: scores are products
query_pre_attn_scalar | scale | say scale=query_pre_attn_scalar ** -0.5
logits_soft_cap attn_logits_soft_cap attn_logit_softcapping logit_cap
    softcap | say softcap=, a positive number, and leave it out for none
attention_sinks | keep_first | say keep_first=, how many of the first keys stay visible
num_sink_tokens sink_size
    keep_first | say keep_first=, how many of the first keys stay visible
    KVCache.attend | leave it out: the cache is made with it, as keep_first
    cu_seqlens_q | say mask=fastattn.masks.Window(left, None) | fastattn.masks.GlobalTokens(index), where
        index has the first keys of each document, with causal= as it is
    mask causal | say mask=fastattn.masks.Window(left, None) | fastattn.masks.GlobalTokens(range(NAME)), with
        causal= as it is
s_aux sink head_sink attention_sinks learnable_sink
    sinks | say sinks=, one logit for each head
    KVCache | leave it out: attend and step take it, as sinks
    attn_mask | call fastattn.attention, which takes it, as sinks
add_zero_attn smooth_softmax
    MultiHeadAttention | leave it out, and give each call a sink of 0 for every head
    sinks | say sinks=np.zeros(H), a sink of 0 for every head
dropout_p dropout_rate attention_dropout attn_dropout dropout seed p
    dropout seed | say dropout=, and seed=, as there is no global random state
    dropout_p | say dropout_p=, which must be 0 here, or call fastattn.attention, which drops weights by a
        seed
    dropout_mask | say p=
    MultiHeadAttention | leave it out, and give each call dropout and a seed
    query | leave it out: no weights are dropped here, as fastattn.attention can
rate prob | dropout_mask | say p=
keep_prob
    dropout seed | say dropout=1 - keep_prob, and seed=, as there is no global random state
    dropout_mask | say p=1 - keep_prob
rng dropout_rng generator random_state philox_seed | seed | say seed=, an int
broadcast_dropout
    dropout | leave it out: each weight is kept or dropped by itself
    query | leave it out: no weights are dropped here, as fastattn.attention can
deterministic
    dropout | leave it out: the same call gives the same bits, and weights are dropped wherever dropout= is
        above 0
    query | leave it out: the same call gives the same bits
training
    dropout | leave it out: weights are dropped wherever dropout= is above 0
    query | leave it out: no weights are dropped here, as fastattn.attention can
# Sizes and layouts
num_heads n_heads n_head nhead num_attention_heads num_query_heads q_num_heads
    create_block_mask | say H=, the heads of the queries
    num_heads | say num_heads=
    num_kv_heads | say num_kv_heads=, the heads of keys and values; those of queries are read from their shape
num_kv_heads num_key_value_heads kv_num_heads n_kv_heads num_k_heads num_v_heads
    create_block_mask | leave it out: a mask is that of the heads of the queries
    num_kv_heads | say num_kv_heads=
    num_heads | leave it out: there are as many as num_heads
num_heads n_heads n_head nhead num_attention_heads num_query_heads q_num_heads num_kv_heads
        num_key_value_heads kv_num_heads n_kv_heads num_k_heads num_v_heads
    x cos | leave it out: the number of heads is read from the shape of x, (..., H, L, D)
    cu_seqlens_q | leave it out: the number of heads is read from the arrays' shapes, (T, H, D)
    query layout | leave it out: the number of heads is read from the arrays' shapes, (..., H, L, D), or
        (..., L, H, D) with layout="bshd"
    MultiHeadAttention.__call__ | leave it out: the layer is made with it
    query | leave it out: the number of heads is read from the arrays' shapes, (..., H, L, D)
    KVCache.append | leave it out: the number of heads is read from the arrays' shapes
enable_gqa num_key_value_groups n_rep
    enable_gqa | say enable_gqa=True
    query | leave it out, for query may always have a multiple of the heads of key and value
head_dim head_size dim_head qk_head_dim key_dim | head_dim | say head_dim=
head_dim head_size dim_head qk_head_dim key_dim dim dims rotary_dim rotary_embedding_dim
    rotary_dim | say rotary_dim=, how many columns are rotated
    x cos | leave it out: twice as many columns are rotated as cos and sin have
value_dim v_head_dim vdim | value_dim | say value_dim=
embed_dim hidden_size d_model kdim vdim key_dim value_dim head_dim output_shape qkv_hidden_sizes
    MultiHeadAttention | leave it out: the sizes are those of w_q, w_k, w_v and w_o
    MultiHeadAttention.__call__ | leave it out: the layer has weights of one size
head_dim head_size dim_head qk_head_dim key_dim value_dim v_head_dim vdim kdim embed_dim hidden_size
        qkv_hidden_sizes
    query | leave it out: it is read from the arrays' shapes, (..., H, L, D)
batch_size batch bsz max_batch_size
    batch | say batch=
    create_block_mask | say B=
    query | leave it out: it is read from the arrays' shapes, (..., H, L, D)
batch_first
    MultiHeadAttention | leave it out: arrays are (..., length, dim)
    MultiHeadAttention.__call__ | leave it out: arrays are (..., length, dim)
    MultiHeadAttention.from_torch | leave it out: arrays are (..., length, dim)
    layout | leave it out, and say layout="bshd" where the arrays are (B, L, H, D)
add_bias_kv | MultiHeadAttention | leave it out: there are no keys beside those of a call
qkv_format tensor_layout input_layout kv_layout head_first | layout | say layout="bhsd" or layout="bshd"
layout qkv_format tensor_layout input_layout kv_layout head_first
    cu_seqlens_q | leave it out: packed arrays are (T, H, D)
    MultiHeadAttention.__call__ | leave it out: arrays are (..., length, dim)
    KVCache.attend | leave it out: the cache is made with it
    KVCache.append | leave it out: the cache is made with it
    decay lengths | leave it out: the state is made with it
    query | leave it out: arrays are (..., H, L, D)
attention_axes | query | leave it out: arrays are (..., H, L, D), and L is the axis
Q_LEN q_len query_length q_length | create_block_mask | say L=
KV_LEN kv_len kv_length | create_block_mask | say S=
separate_full_blocks | create_block_mask | leave it out: full tiles run unmasked
BLOCK_SIZE | create_block_mask | leave it out: tiles are of 64 queries and 128 keys
device
    create_block_mask | leave it out: a block mask is on the host, for arrays anywhere
    any | leave it out: results are where the arrays are
q Q queries inputs_q | query | say query=
k K keys | key | say key=
v V values | value | say value=
x inputs hidden_states | MultiHeadAttention.__call__ | say query=
inputs_kv memory encoder_hidden_states | MultiHeadAttention.__call__ | say key=
# Results
need_weights
    return_weights | say return_weights="mean", which averages over the heads as there, or
        return_weights=True for each head
average_attn_weights
    return_weights | say return_weights="mean" for the mean over the heads, or return_weights=True for each
        head
    query | call fastattn.attention, which returns weights and the log-sum-exp when asked
return_attn_probs return_softmax
    return_weights | say return_weights=True for the weights, and return_lse=True for the log-sum-exp
    query | call fastattn.attention, which returns weights and the log-sum-exp when asked
need_weights return_attention_scores output_attentions return_attention return_attn return_attention_weights
        return_attn_weights
    return_weights | say return_weights=True
    query | call fastattn.attention, which returns weights and the log-sum-exp when asked
qkv | query key | say query=, key= and value=, which may be views of it
need_grad needs_input_grad output_mask argnums | wrt | say wrt=, the names of the arguments
qk_output | return_weights | say return_weights=True for 2, the weights
qk_matmul_output_mode | return_weights | say return_weights=True for mode 3, the weights
return_softmax_lse return_residual return_aux return_logsumexp
    return_lse | say return_lse=True
    query | call fastattn.attention, which returns weights and the log-sum-exp when asked
# Lengths, packed documents, caches
seqlens_k
    key_lengths | say key_lengths=, the number of keys of each item; onnxruntime's seqlens_k is one less
    attn_mask | say attn_mask=np.arange(S) <= seqlens_k[:, None, None, None], as onnxruntime's is one less
        than the number of keys
seq_lens seqlens seq_lengths sequence_lengths valid_length lengths kv_lengths kv_lens kv_seqlens
        key_value_seq_lengths cache_seqlens seqused_k nonpad_kv_seqlen context_lens key_lengths seqlens_k
    cache key_lengths | say key_lengths=, with a cache how many of the new rows are tokens
    key_lengths | say key_lengths=
    KVCache.append | leave it out where it counts what the cache has, which knows that, and say lengths= for
        how many of the new rows are tokens
    decay lengths | say lengths=, how many of the new rows are tokens
    KVCache.attend | leave it out: the cache knows the length of each item; step and append have `lengths`,
        how many of the new rows are tokens
    cu_seqlens_q | leave it out: cu_seqlens_q and cu_seqlens_k say where each document begins; rows beyond its
        length have no place in the arrays
    attn_mask | say attn_mask=np.arange(S) < NAME[:, None, None, None]
cu_seqlens cu_seq_q cu_seqlens_query qo_indptr | cu_seqlens_q | say cu_seqlens_q=
cu_seqlens_kv cu_seq_k cu_seqlens_key kv_indptr | cu_seqlens_k | say cu_seqlens_k=
cu_seqlens cu_seq_q cu_seqlens_q cu_seqlens_query cu_seq_k cu_seqlens_k cu_seqlens_kv cu_seqlens_key qo_indptr
        kv_indptr
    grad_out lse | call fastattn.varlen_attention_backward, which takes packed documents
    query | call fastattn.varlen_attention, which takes packed documents
max_seq_len max_seqlen max_length max_position_embeddings seq_len end
    n_positions | say n_positions=
    KVCache | leave it out: the cache grows as it needs
max_seq_len max_seqlen max_seqlen_q max_seqlen_k max_seqlen_kv max_q max_k max_length seq_len
        total_sequence_length past_sequence_length
    query | leave it out: it is read from the arrays
length | lengths | say lengths=
new_length max_length | KVCache.truncate | say lengths=
past_key_values past_key_value past_key past_value layer_past past use_cache kv_cache k_cache v_cache
        key_cache value_cache cache slot_mapping
    cache | say cache=, a fastattn.KVCache
    feature_map | say state=, which return_state=True gives
    grad_out | give all keys and values: there are no gradients of a cache
    decay lengths | leave it out: the state holds what came before
    query key | use a fastattn.KVCache, whose step appends keys and values and attends to all so far
block_table block_tables page_table
    attention | give fastattn.Paged(pages, table) as key and value
    flex_attention | give fastattn.Paged(pages, table) as key and value
    cu_seqlens_q | call fastattn.attention, with fastattn.Paged(pages, table) as key and value
    KVCache | leave it out: the cache keeps the tables of its pages
block_size | page_size | say page_size=
num_layers layer_idx
    KVCache | leave it out, and make a cache for each layer
    key lengths | leave it out, and make a cache for each layer
kv_cache_dtype cache_dtype storage
    KVCache | say dtype=
    attention | give fastattn.Quantized(data, scale) as key or value
k_scale v_scale k_descale v_descale | attention | give fastattn.Quantized(data, scale) as key or value
q_descale | attention | leave it out: queries are floats, and their factor goes into scale
beam_idx indices index idx | items | say items=
mmap_mode | mmap | say mmap=True
file filename fname | path | say path=
# Rotary positions
offset start_pos seqlen_offset seqlen_offsets
    positions | say positions=NAME + np.arange(L), or NAME[:, None] + np.arange(L) where each item has its own
position_ids position cache_position input_pos pos | positions | say positions=
offset start_pos seqlen_offset seqlen_offsets position_ids positions position cache_position input_pos pos
    MultiHeadAttention.__call__ | leave it out: the layer counts positions, after what its cache holds
    KVCache.append | leave it out: new rows follow those of the cache; rotate keys before, by fastattn.rope
    KVCache.attend | leave it out: the last query is at the last position; rotate before, by fastattn.rope
start_pos seqlen_offset seqlen_offsets position_ids positions position cache_position input_pos pos
    query key | rotate query and key before, by fastattn.rope, which takes positions
rotary_cos rotary_sin cos sin rotary_emb rotary_embedding position_embeddings freqs_cis rope
    MultiHeadAttention | say rope=(cos, sin)
    MultiHeadAttention.__call__ | leave it out: the layer is made with its tables
rotary_interleaved is_interleaved traditional | interleaved | say interleaved=
is_neox_style | interleaved | say interleaved=not is_neox_style
interleaved rotary_interleaved is_interleaved traditional
    MultiHeadAttention | leave it out, and permute the columns of w_q and w_k, and b_q and b_k, as the
        docstring of fastattn.rope shows
rotary_cos rotary_sin cos sin rotary_emb rotary_embedding position_embeddings freqs_cis rope do_rotary
        rotary_dim rotary_embedding_dim rotary_interleaved is_interleaved traditional is_neox_style
        pos_encoding_mode rope_theta rope_scale
    query key | rotate query and key before, by fastattn.rope
unsqueeze_dim | x cos | leave it out, and say layout="bshd" where x is (..., L, H, D)
conjugate | inverse | say inverse=True
theta rope_theta rotary_base | rope_tables | say base=
scale | rope_tables | say scaling=("linear", 1 / scale)
base theta rope_theta rotary_base scaling n_positions
    x cos | give it to fastattn.rope_tables, which makes cos and sin
rope_scaling | rope_tables | say scaling=("linear", factor), or another of those it lists
# Relatives
initial_state initial_states past_state conv_state conv_states | state | say state=
output_final_state return_final_state return_final_states | return_state | say return_state=True
seq_idx cu_seqlens query_start_loc
    activation weight | leave it out, and call it for each sequence by itself
final_states_out | activation weight | say return_state=True, which gives them
initial_state state output_final_state return_final_state return_state
    decay lengths | leave it out: the state holds what came before, and is kept
kernel kernel_fn feature_fn phi
    feature_map | say feature_map=
    bandwidth | leave it out: the kernel is Gaussian
eps epsilon | feature_map | leave it out: 0 / 0 gives 0
nb_features n_features n_components | num_features | say num_features=
ortho_scaling | num_features | leave it out: vectors have random lengths, as with 0 there
normalize | feature_map | leave it out: sums are always divided by those of the weights
ortho | orthogonal | say orthogonal=
h bw sigma length_scale | bandwidth | say bandwidth=
bw_method
    bandwidth | say bandwidth=, a standard deviation; SciPy's scales the covariance, as that of
        fastattn.integrations.scipy.gaussian_kde
gamma | bandwidth | say bandwidth=(2 * gamma) ** -0.5
metric metric_params | bandwidth | leave it out: distances are Euclidean
algorithm atol rtol breadth_first leaf_size
    bandwidth | leave it out: all pairs are computed, there is no tree
axis keepdims | bandwidth | leave it out: sums are over the observations
b | kernel_logsumexp | say log_weights=np.log(b)
sample_weight weights
    kernel_regression | say weights=
    kernel_logsumexp | say log_weights=np.log(NAME)
    bandwidth | leave it out here: fit takes sample_weight
log_weights | kernel_regression | say weights=np.exp(log_weights)
outputs | outs | say outs=
lse softmax_lse
    lses | say lses=
    lse | say lse=
dout grad_output | grad_out | say grad_out=
dlse | grad_lse | say grad_lse=
size | dropout_mask | say shape=
# How it is computed
n_jobs n_threads nthreads threads num_workers workers num_threads
    num_threads | say num_threads=
    any | leave it out: fastattn.set_num_threads says how many threads are used
implementation attn_implementation op
    backend | say backend=, "cython", "numba" or "reference", or leave it out
kernel_options _compile | mask_mod | leave it out: functions are always compiled
flash_attention use_flash use_flash_attn num_splits pack_gqa sm_margin implementation attn_implementation op
        kernel_options backend
    query | leave it out: how to compute is chosen for each call
dtype
    x cos | leave it out: the result has the dtype of x
    decay lengths | leave it out: the state is made with it
    query | leave it out: query, key and value decide, by their dtypes
softmax_precision softmax_dtype precision preferred_element_type force_fp32_for_softmax
    query | leave it out: it is float32 for 16-bit arrays, and their own for others
axis
    KVCache.append | leave it out: rows follow those of the cache
    query | leave it out: the softmax is over the keys
keepdims | query | leave it out: the result has the axes of query
# What `attention` has
mask bias causal window key_lengths softcap sinks return_lse return_weights scale
    query | call fastattn.attention, which takes it
out
"""


def _table() -> dict[str, list[tuple[str, ...]]]:
    table: dict[str, list[tuple[str, ...]]] = {}
    names: list[str] = []
    for line in re.sub(r"\n#.*", "", re.sub(r"\n {8}", " ", _ROWS)).splitlines():
        is_answer = line.startswith(" ")
        parts = line.strip().split(" | ", 1 if is_answer else 2)
        if not is_answer:
            names, parts = parts[0].split(), parts[1:]
        for name in names:
            table.setdefault(name, []).extend([tuple(parts)] if parts else [])
    return table


#: The answers for each name, in order.
ANSWERS = _table()


def refusal(function: Callable[..., Any], extra: tuple[Any, ...], unknown: Iterable[str]) -> str:
    """Why `function` does not take some arguments by position and others by name, and what to say instead."""
    parameters = inspect.signature(function).parameters
    name = function.__qualname__.removesuffix(".__init__")
    names = [p for p in parameters if p not in ("self", "cls")]
    if extra:
        places = [p for p in names if parameters[p].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        return (
            f"{name}() takes {len(places)} positional arguments ({', '.join(places)}), but "
            f"{len(places) + len(extra)} were given: the others go by name{_place_of(extra[0], names)}"
        )
    # An integration's `attention` takes no more of what answers say of `fastattn.attention` than it names.
    here = {"any", *names, *(() if ".integrations." in function.__module__ else (name,))}
    complaints = [f"{argument!r}{_instead(argument, here, names)}" for argument in unknown]
    return f"{name}() got an unexpected keyword argument {', and '.join(complaints)}"


def _place_of(value: Any, parameters: list[str]) -> str:
    """Where a value given by position was most likely meant to go."""
    if callable(value) and "score_mod" in parameters:
        return ", here score_mod=..."
    if type(value) is int and "cu_seqlens_q" in parameters:
        return "; a maximum length is left out"
    place, written, note = "mask" if isinstance(value, Mask) else "", "...", ""
    dtype = str(value.dtype) if hasattr(value, "dtype") and np.ndim(value) else ""
    is_mask = "bool" in dtype or (_has_zeros_and_ones(value) if "float" in dtype or "int" in dtype else False)
    if is_mask:
        place, written = "mask", "array.astype(bool)" if "float" in dtype else "array"
        note = " (non-zero = may attend)"
    elif "float" in dtype:
        place = "bias"
        if is_mask is None:
            note = ", unless it holds zeros and ones alone: those are a mask, array.astype(bool)"
    return f", here {place}={written}{note}" if place in parameters else ""


def _has_zeros_and_ones(value: Any) -> bool | None:
    """None where its numbers cannot be read: in a graph that has not run, on a GPU, or in an autograd box."""
    if hasattr(value, "__dask_graph__"):
        return None
    try:
        return has_zeros_and_ones(np.asarray(value))
    except (TypeError, ValueError, RuntimeError):
        return None


def _instead(argument: str, here: set[str], parameters: list[str]) -> str:
    if argument in ANSWERS:
        answer = next((say for needed, say in ANSWERS[argument] if here.issuperset(needed.split())), None)
        return "" if answer is None else f": {answer.replace('NAME', argument)}"
    close = next((p for p in parameters if _is_slip(argument, p)), None)
    return "" if close is None else f". Did you mean {close!r}?"


def _is_slip(word: str, meant: str) -> bool:
    """Whether two words differ by one letter that is missing or too many, or by two swapped neighbours.

    Not for short words, another first letter or a replaced letter: these may mean something else.
    """
    if len(meant) < 4 or word[:1] != meant[0]:
        return False
    short, long = sorted((word, meant), key=len)
    if len(long) == len(short) + 1:
        return any(long[:i] + long[i + 1 :] == short for i in range(len(long)))
    swapped = (word[:i] + word[i + 1] + word[i] + word[i + 2 :] for i in range(len(word) - 1))
    return len(word) == len(meant) and meant in swapped
