// GMRES: one step of a row, after a product with M. The directions p have orthonormal images q = A p, A = I - M.
#pragma once
#include "steps.h"

namespace equilibria {

constexpr double STAGNATION = 0.9;  // the constant of solvers/krylov.py

// Choose the vector of the next product: the residual, plus the last image if the residual hardly shrank.
template <class T>
EQ_INLINE void direction(const Row<T>& row, const Call<T>& call, int64_t r, T length, const T* image) {
    const int64_t n = row.c.n;
    if (!call.out) return;
    T* out = call.out + r * n;
    if (!row.running()) return void(std::memset(out, 0, sizeof(T) * n));
    const T* left = row.vector(row.c.residual);
    const T share = image && length > T(STAGNATION) * row.of(row.c.shortest) ? length : T(0);
    if (share == 0) return copy(out, left, n);
    for (int64_t i = 0; i < n; ++i) out[i] = left[i] + share * image[i];
}

template <class T>
EQ_INLINE T size_of(const Row<T>& row, const T* z, const T* left) {
    if (row.c.scale) return T(0);  // the size is given
    Lanes<T> square;
    square.clear();
    T x[CHUNK];
    for (int64_t j = 0; j < row.c.n; j += CHUNK) {
        int64_t m = least(CHUNK, row.c.n - j);
        for (int64_t i = 0; i < m; ++i) x[i] = z[j + i] + left[j + i];
        square.add(x, x, m);
    }
    return std::sqrt(square.sum());
}

// Begin at the start z with its value f(z).
template <class T>
EQ_INLINE void gmres_begin(const Context& c, const Call<T>& call, int64_t r, int64_t place, Scratch<T>&) {
    Row<T> row{c, place};
    const T *z = call.a + r * c.n, *fz = call.b + r * c.n;
    T* left = row.vector(c.residual);
    begin(row);
    copy(row.vector(c.iterate), z, c.n);
    difference(left, fz, z, c.n);
    const T length = std::sqrt(dot<T>(left, left, c.n));
    record(row, 0, length, size_of<T>(row, z, left));
    keep_best<T>(row, 0, z, z, call.out == nullptr);
    row.of(c.shortest) = length;
    direction<T>(row, call, r, T(0), nullptr);
}

// Store the direction of the new pair and move z along it; returns the norm of the new residual.
template <class T>
EQ_INLINE T move_along(const Pairs<T>& pairs, const Added<T>& added, Scratch<T>& s, const T* p, const T* z, T* next) {
    const Row<T>& row = pairs.row;
    T *left = row.vector(row.c.residual), x[CHUNK];
    Lanes<T> remaining;
    remaining.clear();
    for (int64_t j = 0; j < row.c.n; j += CHUNK) {
        const int64_t m = least(CHUNK, row.c.n - j);
        copy(x, p + j, m);
        subtract_all(x, s.w.data(), 0, pairs.k, [&](int64_t i) { return pairs.second(i) + j; }, m);
        for (int64_t i = 0; i < m; ++i) {
            x[i] *= added.scale;
            next[j + i] = z[j + i] + added.share * x[i];
            added.first[j + i] *= added.scale;
        }
        copy(added.second + j, x, m);
        subtract(left + j, added.share, added.first + j, m);
        remaining.add(left + j, left + j, m);
    }
    return std::sqrt(remaining.sum());
}

template <class T>
EQ_INLINE void gmres(const Context& c, const Call<T>& call, int64_t r, int64_t place, Scratch<T>& s) {
    Row<T> row{c, place};
    if (!row.running()) return direction<T>(row, call, r, T(0), nullptr);
    const T *p = call.a + r * c.n, *mp = call.b + r * c.n, *z = row.vector(c.iterate), *left = row.vector(c.residual);
    T* next = row.vector(c.other);
    Pairs<T> pairs(row);
    const Added<T> added = add_pair<false>(pairs, s, [=](T* x, T* y, int64_t j, int64_t m) {
        difference(x, p + j, mp + j, m);
        copy(y, left + j, m);
    });
    const T length = move_along(pairs, added, s, p, z, next);
    record(row, call.step, length, size_of<T>(row, next, left));
    keep_best<T>(row, call.step, next, z, call.out == nullptr);
    direction<T>(row, call, r, length, added.first);
    grow(row, !(length < T(c.slow) * row.of(c.shortest)));
    row.of(c.shortest) = length;
}

}  // namespace equilibria
