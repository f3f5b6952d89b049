// Picard and Anderson: one step of a row.
#pragma once
#include "steps.h"

namespace equilibria {

template <class T>
EQ_INLINE void relax(T* out, const T* z, const T* fz, T damping, int64_t n) {  // with the roundings of torch.lerp
    if (damping == 1) return copy(out, fz, n);
    for (int64_t i = 0; i < n; ++i)
        out[i] = damping < T(0.5) ? z[i] + damping * (fz[i] - z[i]) : fz[i] - (1 - damping) * (fz[i] - z[i]);
}

template <class T>
EQ_INLINE void picard(const Context& c, const Call<T>& call, int64_t r, int64_t place, Scratch<T>&) {
    Row<T> row{c, place};
    T length, growth;
    if (observe(row, call, r, length, growth)) relax(call.out + r * c.n, call.a + r * c.n, call.b + r * c.n, T(c.damping), c.n);
}

constexpr double GROWTH = 5.0;  // the constant of solvers/anderson.py

// Drop the history of a row whose residual grew GROWTH-fold, or did not shrink for `patience_of_trust` steps. Returns true if
// the last step was slow.
template <class T>
EQ_INLINE bool judge(const Row<T>& row, T length, T growth) {
    T& shortest = row.of(row.c.shortest);
    const bool slow = !(length < T(row.c.slow) * shortest);
    int64_t& waited = row.c.waited[row.place];
    if (growth < 1) {
        shortest = length;
        waited = 0;
        return slow;
    }
    waited = length >= shortest ? waited + 1 : 0;
    const int64_t usual = row.c.patience_of_trust + (row.c.most < row.c.n ? 0 : row.c.most);
    const int64_t most = row.c.own ? row.c.own->trust[row.place] : usual;
    if (length <= T(GROWTH) * shortest && waited < most) {
        if (length < shortest) shortest = length;
    } else {
        shortest = length;
        waited = 0;
        row.count() = 0;
    }
    return slow;
}

// Record an iterate and judge the history; returns true if a step follows. The first step needs no history and is taken here.
template <class T>
EQ_INLINE bool begin_step(const Row<T>& row, const Call<T>& call, int64_t r, bool& slow) {
    const Context& c = row.c;
    T length, growth;
    if (!observe(row, call, r, length, growth)) return false;
    slow = judge(row, length, growth);
    if (row.age(call.step) != 0) return true;
    const T *z = call.a + r * c.n, *fz = call.b + r * c.n;
    difference(row.vector(c.residual), fz, z, c.n);
    copy(row.vector(c.value), fz, c.n);
    relax(call.out + r * c.n, z, fz, T(c.damping), c.n);
    return false;
}

// Store the value of the new pair and write the next iterate f(z) - sum of u (values).
template <class T>
EQ_INLINE void mix(const Pairs<T>& pairs, const Added<T>& added, Scratch<T>& s, const T* z, const T* fz, T* out) {
    const Row<T>& row = pairs.row;
    T *g0 = row.vector(row.c.residual), *f0 = row.vector(row.c.value), x[CHUNK], y[CHUNK];
    for (int64_t j = 0; j < row.c.n; j += CHUNK) {
        const int64_t m = least(CHUNK, row.c.n - j);
        difference(x, fz + j, f0 + j, m);
        copy(y, fz + j, m);
        const auto value = [&](int64_t i) { return pairs.second(i) + j; };
        subtract_all(x, s.w.data(), 0, pairs.k, value, m);
        subtract_all(y, s.u.data(), pairs.replaced, pairs.k, value, m);
        for (int64_t i = 0; i < m; ++i) {
            x[i] *= added.scale;
            y[i] -= added.share * x[i];
            added.first[j + i] *= added.scale;
        }
        copy(added.second + j, x, m);
        copy(out + j, y, m);
        copy(f0 + j, fz + j, m);
        difference(g0 + j, fz + j, z + j, m);
    }
}

// z <- z - (1 - damping) (residual - sum of u (differences)).
template <class T>
EQ_INLINE void damp(const Pairs<T>& pairs, const Added<T>& added, Scratch<T>& s, T* out) {
    const Row<T>& row = pairs.row;
    const T rest = 1 - T(row.c.damping);
    T x[CHUNK];
    for (int64_t j = 0; j < row.c.n; j += CHUNK) {
        const int64_t m = least(CHUNK, row.c.n - j);
        copy(x, row.vector(row.c.residual) + j, m);
        subtract_all(x, s.u.data(), pairs.replaced, pairs.k, [&](int64_t i) { return pairs.first(i) + j; }, m);
        subtract(x, added.share, added.first + j, m);
        subtract(out + j, rest, x, m);
    }
}

template <class T>
EQ_INLINE void anderson(const Context& c, const Call<T>& call, int64_t r, int64_t place, Scratch<T>& s) {
    Row<T> row{c, place};
    bool slow;
    if (!begin_step(row, call, r, slow)) return;
    const T *z = call.a + r * c.n, *fz = call.b + r * c.n, *g0 = row.vector(c.residual);
    T* out = call.out + r * c.n;
    Pairs<T> pairs(row);
    const Added<T> added = add_pair<true>(pairs, s, [=](T* x, T* y, int64_t j, int64_t m) {
        difference(y, fz + j, z + j, m);
        difference(x, y, g0 + j, m);
    });
    mix(pairs, added, s, z, fz, out);
    if (c.damping != 1) damp(pairs, added, s, out);
    grow(row, slow);
}

}  // namespace equilibria
