"""The compiled step: from tokens to logits, reading every weight once. Needs Numba (extra `fast`).

All threads run `step` together. They share products and attention heads by claiming pieces; each computes norms and the
stream for itself, so there are five barriers per block. The result is bit-identical for any number of threads and for
any other positions in the same step: one token of many rows, or many tokens of one.
"""

import math
import os

import numpy as np
from numba import njit, types

from mainstem.generation.compiled import records, simd
from mainstem.model.kernels.address import add_to, floats, seen_at
from mainstem.model.kernels.arithmetic import exp, gelu_tanh, logistic

WAITS = 4000
"""Polls of a counter before the thread yields the processor."""
PAGE = 4096
"""Bytes of a page, at which hardware prefetching ends: a single row prefetches that far ahead."""
SHORT = 4
"""The most short pieces per thread."""
ROWS, POSITIONS = (4, 4) if simd.WIDE else (2, 2)
"""Rows and positions of a tile: as many sums as the registers hold."""

_one, _column, _pair = simd.product(1, 1), simd.product(ROWS, 1), simd.product(ROWS, 2)
_tile = simd.product(ROWS, POSITIONS)
_let_others = types.ExternalFunction("SwitchToThread" if os.name == "nt" else "sched_yield", types.int32())
_compiled = njit(nogil=True, error_model="numpy")


@_compiled
def step(like, model, blocks, positions, works, thread):
    """Read the tokens of `positions`, store their keys and values in the cache and their logits in `logits`.

    Args:
        like: an array of the type in which weights are stored.
        model, blocks: the records of `ModelRecords`.
        positions: (P,) records, those of one row together and in order.
        works: one WORK record, the buffers.
        thread: the index of this thread; all threads must call it.

    Returns whether the step was completed, not abandoned.
    """
    m, work = model[0], works[0]
    P, C, W = len(positions), m.wte.inputs, m.n_head * m.d_head
    stream = work.own + thread * work.own_bytes
    reads, met = stream + 4 * work.capacity * C, 0
    _embed(like, m, positions, stream)
    for index in range(len(blocks)):
        block, phase = blocks[index], records.PHASES * index
        _read(block.res_1, m, stream, reads, P)
        _times(like, work, phase, block.c_attn, reads, 4 * C, work.qkv, 12 * W, P)
        if not _meet(work, met + 1):
            return False
        _attend(m, block, positions, work, phase + 1, index, thread)
        if not _meet(work, met + 2):
            return False
        _times(like, work, phase + 2, block.attn_proj, work.z, 4 * W, work.attn_write, 4 * C, P)
        if not _meet(work, met + 3):
            return False
        _add(block.res_1, m, work.attn_write, stream, reads, P)
        met += 3
        if m.d_mlp > 0:
            _read(block.res_2, m, stream, reads, P)
            _feed(like, m, work, phase + 3, block.c_fc, reads, P)
            if not _meet(work, met + 1):
                return False
            _times(like, work, phase + 4, block.mlp_proj, work.post, 4 * m.d_mlp, work.mlp_write, 4 * C, P)
            if not _meet(work, met + 2):
                return False
            _add(block.res_2, m, work.mlp_write, stream, reads, P)
            met += 2
    for p in range(P):
        _normalise(m.ln_f, m.ones, stream + 4 * C * p, reads + 4 * C * p, C)
    _times(like, work, records.PHASES * len(blocks), m.head, reads, 4 * C, work.logits, 4 * m.head.outputs, P)
    return _meet(work, met + 1)


@_compiled
def _meet(work, count):
    """A barrier: wait until every thread has arrived `count` times. Returns False if the step was abandoned."""
    if work.threads == 1:
        return True
    add_to(work.sync + records.ARRIVED, 1)
    looks = 0
    while seen_at(work.sync + records.ARRIVED) < count * work.threads:
        if seen_at(work.sync + records.ABANDONED) != 0:
            return False
        looks += 1
        if looks > WAITS:
            _let_others()
    return True


@_compiled
def _claim(work, phase):
    """Claim the next piece of a phase; returns its index, from 0."""
    return add_to(work.sync + records.CLAIMS + records.LINE * phase, 1)


@_compiled
def _piece(work, number, count):
    """The first and last row of a piece of `count` rows; first = count after the last piece.

    Three quarters of the rows are one long piece per thread; the rest are short pieces, which balance the threads.
    """
    long = count * 3 // (4 * work.threads) // ROWS * ROWS
    if number < work.threads:
        return long * number, long * (number + 1)
    left = count - long * work.threads
    short = (left // (SHORT * work.threads) // ROWS + 1) * ROWS
    first = long * work.threads + short * (number - work.threads)
    return min(first, count), min(first + short, count)


@_compiled
def _times(like, work, phase, matrix, x, x_step, out, out_step, P):
    """Compute matrix x + bias at P positions; the threads claim rows of the matrix."""
    first, last = _piece(work, _claim(work, phase), matrix.outputs)
    while first < matrix.outputs:
        _rows(like, matrix, first, last, x, x_step, out + 4 * first, out_step, P)
        first, last = _piece(work, _claim(work, phase), matrix.outputs)


@_compiled
def _rows(like, matrix, first, last, x, x_step, out, out_step, P):
    """Compute rows first to last of matrix x + bias into `out`; the weights after them are prefetched."""
    n, w_step, count = matrix.inputs, matrix.inputs * like.itemsize, last - first
    w, r = matrix.weight + first * w_step, 0
    while P > 1 and r + ROWS <= count:
        at, to, ahead, p = w + r * w_step, out + 4 * r, w + (r + ROWS) * w_step, 0
        while p + POSITIONS <= P:
            _tile(like, at, w_step, x + p * x_step, x_step, to + p * out_step, out_step, n, ahead)
            ahead += w_step
            p += POSITIONS
        if p + 2 <= P:
            _pair(like, at, w_step, x + p * x_step, x_step, to + p * out_step, out_step, n, ahead)
            ahead += w_step
            p += 2
        if p < P:
            _column(like, at, w_step, x + p * x_step, x_step, to + p * out_step, out_step, n, ahead)
        r += ROWS
    while r < count:
        for p in range(P):
            at = w + r * w_step
            _one(like, at, w_step, x + p * x_step, x_step, out + 4 * r + p * out_step, out_step, n, at + PAGE)
        r += 1
    for p in range(P):
        y = floats(out + p * out_step, count)
        if matrix.scale != 0:
            scale = floats(matrix.scale + 4 * first, count)
            for i in range(count):
                y[i] *= scale[i]
        if matrix.bias != 0:
            bias = floats(matrix.bias + 4 * first, count)
            for i in range(count):
                y[i] += bias[i]


@_compiled
def _embed(like, m, positions, stream):
    """Write the sum of token and position embeddings to `stream`."""
    C = m.wte.inputs
    for p in range(len(positions)):
        at = positions[p]
        x, token = floats(stream + 4 * C * p, C), m.wte.weight + at.id * C * like.itemsize
        for i in range(C):
            x[i] = simd.widened(like, token + i * like.itemsize)
        if m.wte.scale != 0:
            scale = floats(m.wte.scale + 4 * at.id, 1)[0]
            for i in range(C):
                x[i] *= scale
        if m.wpe != 0:
            place = floats(m.wpe + 4 * C * at.place, C)
            for i in range(C):
                x[i] += place[i]


@_compiled
def _normalise(norm, ones, source, target, n):
    """Write the norm of n float32 at `source` to `target`, which may be the same; without a norm, a copy."""
    x, y, mean = floats(source, n), floats(target, n), np.float32(0.0)
    if norm.kind == records.LAYERNORM:
        mean = simd.inner(source, ones, n) / np.float32(n)
    for i in range(n):
        y[i] = x[i] - mean
    if norm.kind != records.NO_NORM:
        scale = np.float32(1.0) / np.float32(math.sqrt(simd.inner(target, target, n) / np.float32(n) + norm.eps))
        gain = floats(norm.gain, n)
        for i in range(n):
            y[i] = y[i] * scale * gain[i]
    if norm.bias != 0:
        bias = floats(norm.bias, n)
        for i in range(n):
            y[i] += bias[i]


@_compiled
def _read(join, m, stream, reads, P):
    """Compute the input of a branch, damp * ln_in(x)."""
    C = m.wte.inputs
    for p in range(P):
        _normalise(join.ln_in, m.ones, stream + 4 * C * p, reads + 4 * C * p, C)
        if join.damp != np.float32(1.0):
            read = floats(reads + 4 * C * p, C)
            for i in range(C):
                read[i] *= join.damp


@_compiled
def _add(join, m, written, stream, spare, P):
    """Add a branch's output to the stream: ln_add(skip * x + gain * ln_out(f))."""
    C = m.wte.inputs
    for p in range(P):
        x, write = floats(stream + 4 * C * p, C), floats(spare + 4 * C * p, C)
        _normalise(join.ln_out, m.ones, written + 4 * C * p, spare + 4 * C * p, C)
        if join.gain != 0:
            gain = floats(join.gain, C if join.gain_step != 0 else 1)
            for i in range(C):
                write[i] *= gain[i * join.gain_step]
        if join.skip == np.float32(0.0):  # exact, also where x overflowed
            for i in range(C):
                x[i] = write[i]
        else:
            for i in range(C):
                x[i] = join.skip * x[i] + write[i]
        _normalise(join.ln_add, m.ones, stream + 4 * C * p, stream + 4 * C * p, C)


@_compiled
def _feed(like, m, work, phase, matrix, reads, P):
    """Compute the MLP's hidden layer, act(W x), or gated act(gate) * up; the threads claim its rows."""
    M, C = m.d_mlp, m.wte.inputs
    first, last = _piece(work, _claim(work, phase), M)
    while first < M:
        _rows(like, matrix, first, last, reads, 4 * C, work.post + 4 * first, 4 * M, P)
        if m.gated != 0:
            _rows(like, matrix, M + first, M + last, reads, 4 * C, work.up + 4 * first, 4 * M, P)
        for p in range(P):
            post = floats(work.post + 4 * (M * p + first), last - first)
            _activate(m.activation, post)
            if m.gated != 0:
                up = floats(work.up + 4 * (M * p + first), last - first)
                for i in range(last - first):
                    post[i] *= up[i]
        first, last = _piece(work, _claim(work, phase), M)


@_compiled
def _attend(m, block, positions, work, phase, index, thread):
    """Compute attention for every head of every row, position by position; the threads claim heads."""
    each, D, W = len(positions) // work.rows, m.d_head, m.n_head * m.d_head
    task = _claim(work, phase)
    while task < work.rows * m.n_head:
        head = task % m.n_head
        for p in range(task // m.n_head * each, (task // m.n_head + 1) * each):
            at = positions[p]
            q = work.qkv + 4 * (3 * W * p + head * D)
            place = index * work.block_bytes + at.row * work.row_bytes + head * work.head_bytes
            keys, values = work.keys + place, work.values + place
            _enter(block.q_norm, m, at.place, q, q)
            _enter(block.k_norm, m, at.place, q + 4 * W, keys + 4 * D * at.column)
            value, cached = floats(q + 8 * W, D), floats(values + 4 * D * at.column, D)
            for i in range(D):
                cached[i] = value[i]
            start = 4 * D * at.first
            scores = floats(work.scores + thread * work.scores_bytes, at.column - at.first + 1)
            _mix(D, block.attn_scale, q, keys + start, values + start, scores, work.z + 4 * (W * p + head * D))
        task = _claim(work, phase)


@_compiled
def _enter(norm, m, place, source, target):
    """Write a query or key after QK-norm and rotation to `target`."""
    D = m.d_head
    _normalise(norm, m.ones, source, target, D)
    if m.cos != 0:
        half, x = D // 2, floats(target, D)
        cos, sin = floats(m.cos + 4 * half * place, half), floats(m.sin + 4 * half * place, half)
        for i in range(half):
            a, b = x[i], x[half + i]
            x[i], x[half + i] = a * cos[i] - b * sin[i], a * sin[i] + b * cos[i]


@_compiled
def _mix(D, scale, q, keys, values, scores, z):
    """Write softmax(scale q k) v, over as many positions as there are scores, to z."""
    count, j, at = len(scores), 0, scores.ctypes.data
    while j + ROWS <= count:
        _column(scores, keys + 4 * D * j, 4 * D, q, 0, at + 4 * j, 0, D, keys + 4 * D * (j + ROWS))
        j += ROWS
    while j < count:
        scores[j] = simd.inner(keys + 4 * D * j, q, D)
        j += 1
    most = scores[0]
    for j in range(count):
        most = scores[j] if scores[j] > most else most
    for j in range(count):
        scores[j] = exp(scale * (scores[j] - most))
    mixed, total = floats(z, D), np.float32(0.0)
    for i in range(D):
        mixed[i] = np.float32(0.0)
    for j in range(count):
        weight, value = scores[j], floats(values + 4 * D * j, D)
        total += weight
        for i in range(D):
            mixed[i] += weight * value[i]
    for i in range(D):
        mixed[i] /= total


@_compiled
def _activate(kind, x):
    """Apply the activation to every value in place."""
    if kind == records.GELU_TANH:
        for i in range(len(x)):
            x[i] = gelu_tanh(x[i])
    elif kind == records.GELU:
        for i in range(len(x)):
            x[i] *= np.float32(0.5) * (np.float32(1.0) + np.float32(math.erf(x[i] * np.float32(0.7071067811865476))))
    elif kind == records.SILU:
        for i in range(len(x)):
            x[i] *= logistic(x[i])
    else:
        for i in range(len(x)):
            x[i] = np.float32(0.0) if x[i] < np.float32(0.0) else x[i]
    if kind == records.RELU2:
        for i in range(len(x)):
            x[i] *= x[i]
