// Sums over vectors in a fixed order: the result depends on the numbers and their count alone, never on alignment, on the
// position of a row in its batch or on the number of threads.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__GNUC__) || defined(__clang__)
#define EQ_INLINE inline __attribute__((always_inline))
#define EQ_RESTRICT __restrict__
#else
#define EQ_INLINE inline
#define EQ_RESTRICT
#endif

namespace equilibria {

constexpr int64_t CHUNK = 512;  // numbers processed at a time; a few chunks fit into the first-level cache

#if defined(__GNUC__) || defined(__clang__)
template <class T, int BYTES>
struct Halves {  // the sum of a vector, its halves added first
    typedef T Whole __attribute__((vector_size(BYTES), aligned(sizeof(T)), may_alias));
    typedef T Half __attribute__((vector_size(BYTES / 2), aligned(sizeof(T)), may_alias));
    static EQ_INLINE T sum(const Whole& v) {
        Half a, b;
        std::memcpy(&a, &v, sizeof a);
        std::memcpy(&b, reinterpret_cast<const char*>(&v) + sizeof a, sizeof b);
        return Halves<T, BYTES / 2>::sum(a + b);
    }
};
template <class T>
struct Halves<T, 16> {
    typedef T Whole __attribute__((vector_size(16), aligned(sizeof(T)), may_alias));
    static EQ_INLINE T sum(const Whole& v) {
        if constexpr (sizeof(T) == 8) return v[0] + v[1];
        else return (v[0] + v[2]) + (v[1] + v[3]);
    }
};
#endif

template <class T>
struct Lanes {  // partial sums, added up pairwise in the end
    static constexpr int64_t WIDTH = 128 / sizeof(T);
#if defined(__GNUC__) || defined(__clang__)
    typedef T Part __attribute__((vector_size(32), aligned(sizeof(T)), may_alias));  // at any address, also unaligned
    static constexpr int64_t QUARTER = WIDTH / 4;
    Part a, b, c, d;
    static EQ_INLINE Part product(const T* x, const T* y) {
        return *reinterpret_cast<const Part*>(x) * *reinterpret_cast<const Part*>(y);
    }
    EQ_INLINE void clear() { a = b = c = d = Part{}; }
    EQ_INLINE void add(const T* x, const T* y) {
        a += product(x, y);
        b += product(x + QUARTER, y + QUARTER);
        c += product(x + 2 * QUARTER, y + 2 * QUARTER);
        d += product(x + 3 * QUARTER, y + 3 * QUARTER);
    }
    EQ_INLINE void load(T* s) const {
        std::memcpy(s, &a, sizeof a);
        std::memcpy(s + QUARTER, &b, sizeof b);
        std::memcpy(s + 2 * QUARTER, &c, sizeof c);
        std::memcpy(s + 3 * QUARTER, &d, sizeof d);
    }
    EQ_INLINE void store(const T* s) {
        std::memcpy(&a, s, sizeof a);
        std::memcpy(&b, s + QUARTER, sizeof b);
        std::memcpy(&c, s + 2 * QUARTER, sizeof c);
        std::memcpy(&d, s + 3 * QUARTER, sizeof d);
    }
#else
    T part[WIDTH];
    EQ_INLINE void clear() { for (T& x : part) x = 0; }
    EQ_INLINE void add(const T* a, const T* b) { for (int64_t i = 0; i < WIDTH; ++i) part[i] += a[i] * b[i]; }
    EQ_INLINE void load(T* s) const { std::memcpy(s, part, sizeof part); }
    EQ_INLINE void store(const T* s) { std::memcpy(part, s, sizeof part); }
#endif
    EQ_INLINE void add(const T* a, const T* b, int64_t count) {
        Lanes sums = *this;  // in registers: the compiler cannot exclude that `a` or `b` overlap with these sums
        int64_t i = 0;
        for (; i + WIDTH <= count; i += WIDTH) sums.add(a + i, b + i);
        if (i < count) {
            T s[WIDTH];
            sums.load(s);
            for (int64_t j = 0; i < count; ++i, ++j) s[j] += a[i] * b[i];
            sums.store(s);
        }
        *this = sums;
    }
    EQ_INLINE T sum() const {
#if defined(__GNUC__) || defined(__clang__)
        return Halves<T, 32>::sum((a + c) + (b + d));
#else
        T s[WIDTH];
        load(s);
        for (int64_t half = WIDTH / 2; half > 0; half /= 2)
            for (int64_t i = 0; i < half; ++i) s[i] += s[i + half];
        return s[0];
#endif
    }
};

template <class T>
EQ_INLINE T dot(const T* a, const T* b, int64_t n) {
    Lanes<T> s;
    s.clear();
    s.add(a, b, n);
    return s.sum();
}

template <class T>
struct Same {  // keeps a parameter out of the deduction of T
    typedef T type;
};

template <class T>
EQ_INLINE void subtract(T* EQ_RESTRICT x, T weight, const typename Same<T>::type* EQ_RESTRICT v, int64_t count) {
    for (int64_t i = 0; i < count; ++i) x[i] -= weight * v[i];
}

// x <- x - sum of weights[i] vector(i) for i from `from` to `to`, in this order. Four vectors are subtracted in one pass, so
// that x is read and written less often; the roundings are those of one vector at a time.
template <class T, class Vector>
EQ_INLINE void subtract_all(T* EQ_RESTRICT x, const T* weights, int64_t from, int64_t to, const Vector& vector, int64_t count) {
    int64_t i = from;
    for (; i + 4 <= to; i += 4) {
        const T p = weights[i], q = weights[i + 1], r = weights[i + 2], s = weights[i + 3];
        const T *a = vector(i), *b = vector(i + 1), *c = vector(i + 2), *d = vector(i + 3);
        for (int64_t j = 0; j < count; ++j) x[j] = (((x[j] - p * a[j]) - q * b[j]) - r * c[j]) - s * d[j];
    }
    for (; i < to; ++i) subtract(x, weights[i], vector(i), count);
}

template <class T>
EQ_INLINE void difference(T* EQ_RESTRICT out, const T* a, const T* b, int64_t count) {
    for (int64_t i = 0; i < count; ++i) out[i] = a[i] - b[i];
}

template <class T>
EQ_INLINE void copy(T* to, const T* from, int64_t count) { std::memcpy(to, from, sizeof(T) * count); }

EQ_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

}  // namespace equilibria
