// Broyden: one step of a row.
#pragma once
#include <utility>

#include "steps.h"

namespace equilibria {

// Solve matrix x = right by Gaussian elimination with row exchanges, in place; entries that are not finite become 0.
template <class T>
EQ_INLINE void solve_small(T* matrix, T* right, int64_t k) {
    for (int64_t i = 0; i < k; ++i) {
        int64_t pivot = i;
        for (int64_t j = i + 1; j < k; ++j)
            if (std::fabs(matrix[j * k + i]) > std::fabs(matrix[pivot * k + i])) pivot = j;
        if (pivot != i) {
            for (int64_t j = i; j < k; ++j) std::swap(matrix[i * k + j], matrix[pivot * k + j]);
            std::swap(right[i], right[pivot]);
        }
        for (int64_t j = i + 1; j < k; ++j) {
            const T factor = matrix[j * k + i] / matrix[i * k + i];
            subtract(matrix + j * k + i, factor, matrix + i * k + i, k - i);
            right[j] -= factor * right[i];
        }
    }
    for (int64_t i = k - 1; i >= 0; --i) {
        for (int64_t j = i + 1; j < k; ++j) right[i] -= matrix[i * k + j] * right[j];
        right[i] /= matrix[i * k + i];
    }
    for (int64_t i = 0; i < k; ++i)
        if (!std::isfinite(right[i])) right[i] = 0;
}

// Add the last step s and the change s + y of the value to the pairs, and their products to the core.
template <class T>
EQ_INLINE void insert_pair(const Row<T>& row, const T* fz) {
    const Context& c = row.c;
    const int64_t n = c.n, slot = row.count() % row.limit(), k = least(row.count() + 1, row.limit()), width = c.core_size;
    const T *step = row.vector(c.residual), *f0 = row.vector(c.value), length = row.of(c.shortest);
    const bool still = length == 0;
    const T scale = still ? T(0) : 1 / length;
    T *s = row.vector(c.first[slot]), *sums = row.vector(c.second[slot]);
    T* core = static_cast<T*>(c.core) + row.place * width * width;
    for (int64_t i = 0; i < n; ++i) {
        s[i] = step[i] * scale;
        sums[i] = (fz[i] - f0[i]) * scale;
    }
    T x[CHUNK];
    for (int64_t j = 0; j < k; ++j) {  // the new step follows all others
        const T *sj = row.vector(c.first[j]), *sums_j = row.vector(c.second[j]);
        Lanes<T> lower, upper;
        lower.clear();
        upper.clear();
        for (int64_t i = 0; i < n; i += CHUNK) {
            int64_t m = least(CHUNK, n - i);
            difference(x, sums + i, s + i, m);
            upper.add(sj + i, x, m);
            lower.add(sums_j + i, s + i, m);
        }
        core[slot * width + j] = lower.sum();
        core[j * width + slot] = upper.sum() + (j == slot && still ? T(1) : T(0));
    }
    ++row.count();
}

template <class T>
EQ_INLINE void broyden(const Context& c, const Call<T>& call, int64_t r, int64_t place, Scratch<T>& s) {
    Row<T> row{c, place};
    T length, growth;
    if (!observe(row, call, r, length, growth)) return;
    const int64_t n = c.n, width = c.core_size;
    const T *z = call.a + r * n, *fz = call.b + r * n;
    T *out = call.out + r * n, *step = row.vector(c.residual);
    if (row.age(call.step) > 0) insert_pair(row, fz);
    const int64_t k = least(row.count(), row.limit());
    s.fit(c.most);
    if (int64_t(s.matrix.size()) < k * k) s.matrix.resize(k * k);
    const T* core = static_cast<const T*>(c.core) + place * width * width;
    difference(step, fz, z, n);
    for (int64_t i = 0; i < k; ++i) {
        copy(s.matrix.data() + i * k, core + i * width, k);
        s.w[i] = dot<T>(row.vector(c.first[i]), step, n);
    }
    solve_small(s.matrix.data(), s.w.data(), k);
    Lanes<T> square;
    square.clear();
    for (int64_t j = 0; j < n; j += CHUNK) {
        int64_t m = least(CHUNK, n - j);
        subtract_all(step + j, s.w.data(), 0, k, [&](int64_t i) { return row.vector(c.second[i]) + j; }, m);
        square.add(step + j, step + j, m);
        for (int64_t i = 0; i < m; ++i) out[j + i] = z[j + i] + step[j + i];
    }
    row.of(c.shortest) = std::sqrt(square.sum());
    copy(row.vector(c.value), fz, n);
}

}  // namespace equilibria
