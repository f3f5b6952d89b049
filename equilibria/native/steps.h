// Code shared by the methods: the tensors of a call, the record of an iterate, and orthonormal histories.
#pragma once
#include <vector>

#include "record.h"

namespace equilibria {

template <class T>
struct Scratch {  // the working memory of one thread
    std::vector<Lanes<T>> lanes;
    std::vector<T> w, u, matrix;
    std::vector<double> system;
    void fit(int64_t k) {
        if (int64_t(w.size()) >= k) return;
        lanes.resize(2 * k);
        w.resize(k);
        u.resize(k);
    }
};

template <class T>
struct Call {  // the tensors of one call, each (rows, n)
    const T *a, *b, *before;  // iterate and value, and the iterate before; for GMRES direction and its product
    T* out;                   // where to evaluate next; null: this was the last step
    int64_t step;
};

template <class T>
EQ_INLINE void lengths(const T* z, const T* fz, int64_t n, T& length, T& size) {
    Lanes<T> g, f;
    g.clear();
    f.clear();
    T x[CHUNK];
    for (int64_t j = 0; j < n; j += CHUNK) {
        int64_t m = least(CHUNK, n - j);
        difference(x, fz + j, z + j, m);
        g.add(x, x, m);
        f.add(fz + j, fz + j, m);
    }
    length = std::sqrt(g.sum());
    size = std::sqrt(f.sum());
}

// Record z and f(z); returns false if the row has stopped or this was the last step. Stopped rows are evaluated at their answer.
template <class T>
EQ_INLINE bool observe(const Row<T>& row, const Call<T>& call, int64_t r, T& length, T& growth) {
    const int64_t n = row.c.n;
    const T *z = call.a + r * n, *fz = call.b + r * n;
    const int64_t step = row.age(call.step);
    length = growth = 0;
    if (step == 0) begin(row);
    if (row.running()) {
        T size;
        lengths(z, fz, n, length, size);
        growth = record(row, step, length, size);
        keep_best(row, step, z, call.before + r * n, call.out == nullptr);
    }
    if (call.out && !row.running()) copy(call.out + r * n, row.vector(row.c.answer), n);
    return call.out && row.running();
}

// A row's pairs of vectors, oldest first; the view stays the same after `take_slot` has given a slot to a new pair.
template <class T>
struct Pairs {
    const Row<T>& row;
    const int64_t k;
    const int64_t replaced;  // 1: all slots are taken, the oldest pair is overwritten
    int32_t* order;
    const int32_t oldest;
    int64_t shift = 0;  // 1 after `take_slot` has shifted `order`
    explicit EQ_INLINE Pairs(const Row<T>& row)
        : row(row), k(row.count()), replaced(row.count() == row.limit()), order(row.c.order + row.place * row.c.most),
          oldest(k ? order[0] : 0) {}
    EQ_INLINE int32_t slot(int64_t i) const { return i < shift ? oldest : order[i - shift]; }
    EQ_INLINE const T* first(int64_t i) const { return row.vector(row.c.first[slot(i)]); }
    EQ_INLINE const T* second(int64_t i) const { return row.vector(row.c.second[slot(i)]); }
    EQ_INLINE int32_t take_slot() {
        int64_t& count = row.count();
        if (!replaced) {
            order[count] = int32_t(count);
            return int32_t(count++);
        }
        shift = 1;
        for (int64_t i = 1; i < count; ++i) order[i - 1] = order[i];
        return order[count - 1] = oldest;
    }
};

// Let a full history grow after a slow step.
template <class T>
EQ_INLINE void grow(const Row<T>& row, bool slow) {
    const int64_t most = row.c.own ? row.c.own->most[row.place] : row.c.most;
    if (slow && row.count() == row.limit() && row.limit() < most) ++row.limit();
}

// Write the inner products of x with the first vectors of the pairs into s.w, and if BOTH those of y into s.u; returns |x|.
// make(x, y, j, m) writes m numbers of both vectors, beginning at number j.
template <bool BOTH, class T, class Make>
EQ_INLINE T project(const Pairs<T>& pairs, Scratch<T>& s, const Make& make) {
    const int64_t n = pairs.row.c.n;
    T x[CHUNK], y[CHUNK];
    Lanes<T> square;
    square.clear();
    s.fit(pairs.row.c.most);
    for (int64_t i = 0; i < 2 * pairs.k; ++i) s.lanes[i].clear();
    for (int64_t j = 0; j < n; j += CHUNK) {
        const int64_t m = least(CHUNK, n - j);
        make(x, y, j, m);
        square.add(x, x, m);
        for (int64_t i = 0; i < pairs.k; ++i) {
            const T* q = pairs.first(i) + j;
            s.lanes[2 * i].add(x, q, m);
            if (BOTH) s.lanes[2 * i + 1].add(y, q, m);
        }
    }
    for (int64_t i = 0; i < pairs.k; ++i) {
        s.w[i] = s.lanes[2 * i].sum();
        if (BOTH) s.u[i] = s.lanes[2 * i + 1].sum();
    }
    return std::sqrt(square.sum());
}

template <class T>
struct Added {
    T *first, *second;  // vectors of the new pair; `first` is not yet scaled
    T scale;            // factor that makes `first` a unit vector; 0 if only rounding is left of x
    T share;            // inner product of y with it
};

// Orthogonalise x against the pairs and store it as the first vector of a new pair.
template <bool BOTH, class T, class Make>
EQ_INLINE Added<T> add_pair(Pairs<T>& pairs, Scratch<T>& s, const Make& make) {
    const Row<T>& row = pairs.row;
    const T size = project<BOTH>(pairs, s, make);
    const int32_t slot = pairs.take_slot();
    Added<T> added{row.vector(row.c.first[slot]), row.vector(row.c.second[slot]), 0, 0};
    T x[CHUNK], y[CHUNK];
    Lanes<T> left, along;
    left.clear();
    along.clear();
    for (int64_t j = 0; j < row.c.n; j += CHUNK) {
        const int64_t m = least(CHUNK, row.c.n - j);
        make(x, y, j, m);
        subtract_all(x, s.w.data(), 0, pairs.k, [&](int64_t i) { return pairs.first(i) + j; }, m);
        left.add(x, x, m);
        along.add(x, y, m);
        copy(added.first + j, x, m);
    }
    const T rest = std::sqrt(left.sum());
    added.scale = rest <= T(row.c.threshold) * size ? T(0) : 1 / rest;
    added.share = along.sum() * added.scale;
    return added;
}

}  // namespace equilibria
