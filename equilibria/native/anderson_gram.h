// Anderson for long rows: the differences are stored unchanged, with their Gram matrix. A step reads each vector once.
#pragma once
#include "anderson.h"

namespace equilibria {

// Solve (scaled Gram matrix + threshold I) x = right for k weights, by Cholesky in double; false if it is not positive definite.
// `a` is (k, k), row by row, and is overwritten.
EQ_INLINE bool solve_positive(double* a, double* x, int64_t k) {
    for (int64_t i = 0; i < k; ++i) {
        for (int64_t j = 0; j <= i; ++j) {
            double sum = a[i * k + j];
            for (int64_t l = 0; l < j; ++l) sum -= a[i * k + l] * a[j * k + l];
            if (i == j && !(sum > 0)) return false;
            a[i * k + j] = i == j ? std::sqrt(sum) : sum / a[j * k + j];
        }
    }
    for (int64_t i = 0; i < k; ++i) {
        for (int64_t l = 0; l < i; ++l) x[i] -= a[i * k + l] * x[l];
        x[i] /= a[i * k + i];
    }
    for (int64_t i = k - 1; i >= 0; --i) {
        for (int64_t l = i + 1; l < k; ++l) x[i] -= a[l * k + i] * x[l];
        x[i] /= a[i * k + i];
    }
    return true;
}

// Replace the inner products with the residual in s.u by the weights of the differences, oldest first. The result is that of
// `least_squares` in solvers/anderson.py.
template <class T>
EQ_INLINE void least_squares(const Row<T>& row, Scratch<T>& s) {
    const int64_t k = row.count(), size = row.c.core_size;
    const int32_t* order = row.c.order + row.place * row.c.most;
    const T* gram = static_cast<const T*>(row.c.core) + row.place * size * size;
    if (int64_t(s.system.size()) < k * (k + 2)) s.system.resize(k * (k + 2));
    double *a = s.system.data(), *x = a + k * k, *scale = x + k;
    for (int64_t i = 0; i < k; ++i) {
        const double square = gram[order[i] * size + order[i]];
        scale[i] = square > 0 ? 1 / std::sqrt(square) : 0;
        x[i] = scale[i] * s.u[i];
    }
    for (int64_t i = 0; i < k; ++i) {
        for (int64_t j = 0; j <= i; ++j) a[i * k + j] = scale[i] * scale[j] * gram[order[i] * size + order[j]];
        a[i * k + i] += scale[i] > 0 ? row.c.threshold : 1;
    }
    const bool solved = solve_positive(a, x, k);
    for (int64_t i = 0; i < k; ++i) {
        const double weight = x[i] * scale[i];
        s.u[i] = solved && std::isfinite(weight) ? T(weight) : T(0);
    }
}

// Store the newest difference of residuals and its inner products; s.u gets those of all differences with the residual.
template <class T>
EQ_INLINE void add_difference(const Row<T>& row, Scratch<T>& s, const T* z, const T* fz) {
    const Context& c = row.c;
    Pairs<T> pairs(row);
    pairs.take_slot();
    const int64_t k = row.count(), size = c.core_size;
    const int32_t* order = pairs.order;
    s.fit(c.most);
    for (int64_t i = 0; i < 2 * k; ++i) s.lanes[i].clear();
    T *g0 = row.vector(c.residual), *added = row.vector(c.first[order[k - 1]]), x[CHUNK], y[CHUNK];
    for (int64_t j = 0; j < c.n; j += CHUNK) {
        const int64_t m = least(CHUNK, c.n - j);
        difference(y, fz + j, z + j, m);
        difference(x, y, g0 + j, m);
        copy(g0 + j, y, m);
        copy(added + j, x, m);
        for (int64_t i = 0; i < k; ++i) {
            const T* q = i == k - 1 ? x : row.vector(c.first[order[i]]) + j;
            s.lanes[2 * i].add(x, q, m);
            s.lanes[2 * i + 1].add(y, q, m);
        }
    }
    T* gram = static_cast<T*>(c.core) + row.place * size * size;
    for (int64_t i = 0; i < k; ++i) {
        gram[order[k - 1] * size + order[i]] = gram[order[i] * size + order[k - 1]] = s.lanes[2 * i].sum();
        s.u[i] = s.lanes[2 * i + 1].sum();
    }
}

template <class T>
EQ_INLINE void anderson_gram(const Context& c, const Call<T>& call, int64_t r, int64_t place, Scratch<T>& s) {
    Row<T> row{c, place};
    bool slow;
    if (!begin_step(row, call, r, slow)) return;
    const T *z = call.a + r * c.n, *fz = call.b + r * c.n;
    add_difference(row, s, z, fz);
    least_squares(row, s);
    const int64_t k = row.count();
    const int32_t* order = c.order + place * c.most;
    const T damping = T(c.damping), rest = 1 - damping;
    T *out = call.out + r * c.n, *f0 = row.vector(c.value), *g = row.vector(c.residual), x[CHUNK], y[CHUNK];
    T* added = row.vector(c.second[order[k - 1]]);
    for (int64_t j = 0; j < c.n; j += CHUNK) {
        const int64_t m = least(CHUNK, c.n - j);
        difference(x, fz + j, f0 + j, m);
        copy(added + j, x, m);
        copy(y, fz + j, m);
        copy(f0 + j, fz + j, m);
        const auto value = [&](int64_t i) { return i == k - 1 ? x : row.vector(c.second[order[i]]) + j; };
        subtract_all(y, s.u.data(), 0, k, value, m);
        if (damping != 1) {
            copy(x, g + j, m);
            subtract_all(x, s.u.data(), 0, k, [&](int64_t i) { return row.vector(c.first[order[i]]) + j; }, m);
            subtract(y, rest, x, m);
        }
        copy(out + j, y, m);
    }
    grow(row, slow);
}

}  // namespace equilibria
