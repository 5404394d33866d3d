"""Arithmetic of compiled loops is the formulas, alone and in a vector; memory is found by its address."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("numba", reason="numba is an optional extra (`fast`)")
from numba import njit

from mainstem.model.kernels import address, arithmetic

FORMULAS = {"exp": torch.exp, "logistic": torch.sigmoid, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def in_a_loop(function):
    """The function of every number of an array, by a loop that the compiler may make of vectors."""

    @njit(error_model="numpy")
    def every(x, y):
        for i in range(len(x)):
            y[i] = function(x[i])

    def of(x):
        every(x, y := np.empty_like(x))
        return y

    return of


LOOPS = {name: in_a_loop(getattr(arithmetic, name)) for name in FORMULAS}
each = pytest.mark.parametrize("name", FORMULAS)


@each
def test_it_is_the_formula_to_its_last_bits(name):
    x = torch.cat([torch.linspace(-86, 88, 20001), torch.linspace(-3, 3, 20001), torch.zeros(1)])
    found, exact = torch.from_numpy(LOOPS[name](x.numpy())).double(), FORMULAS[name](x.double())
    relative, absolute = {"exp": (2.5e-7, 0), "logistic": (4e-7, 1e-37), "gelu_tanh": (4e-7, 4e-7)}[name]
    assert ((found - exact).abs() <= relative * exact.abs() + absolute).all()
    if name == "exp":
        assert found[-1] == 1


@each
def test_a_number_has_the_same_bits_in_a_vector_and_alone(name):
    x = np.random.default_rng(0).normal(0, 20, 77).astype(np.float32)
    together = LOOPS[name](x)
    for length in (1, 3, 8, 17, 40):
        assert np.array_equal(LOOPS[name](x[-length:]), together[-length:])
    assert [getattr(arithmetic, name)(value) for value in x] == together.tolist()


def test_the_ends():
    inf = float("inf")
    x = np.array([-inf, -1e30, -87, 88, 1e30, inf], np.float32)
    exp = np.exp(np.array([-87, -87, -87, 88, 88, 88], np.float64))
    assert np.allclose(LOOPS["exp"](x), exp, rtol=2.5e-7, atol=0)
    assert np.allclose(LOOPS["logistic"](x), [0, 0, 0, 1, 1, 1], rtol=0, atol=1e-37)


@each
@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001])
def test_what_is_no_number_stays_so(name, bits):
    x = np.full(33, bits, np.uint32).view(np.float32)
    assert np.isnan(LOOPS[name](x)).all()


def test_arrays_are_found_by_their_addresses():
    numbers, whole = np.arange(7, dtype=np.float32), np.arange(5)
    address.floats(numbers.ctypes.data + 8, 3)[:] *= 10
    assert numbers.tolist() == [0, 1, 20, 30, 40, 5, 6]
    assert address.words(whole.ctypes.data + 8, 4).tolist() == [1, 2, 3, 4]


def test_no_addition_of_any_thread_is_lost():
    @njit(nogil=True)
    def count(at, seen):
        for i in range(len(seen)):
            seen[i] = address.add_to(at, 1)
        return address.seen_at(at)

    total, each = np.zeros(1, np.int64), 20000
    seen = [np.empty(each, np.int64) for _ in range(4)]
    count(total.ctypes.data, seen[0][:0])
    with ThreadPoolExecutor(4) as pool:
        last = max(pool.map(lambda own: count(total.ctypes.data, own), seen))
    assert total[0] == last == 4 * each
    assert np.array_equal(np.sort(np.concatenate(seen)), np.arange(4 * each))
