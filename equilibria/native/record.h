// The record of a step, row by row: residual, size, best iterate, status and steps, as `_core/bookkeeping.py` keeps them.
#pragma once
#include <limits>

#include "context.h"
#include "vectors.h"

namespace equilibria {

constexpr double PROGRESS = 0.9;         // the constants of bookkeeping.py
constexpr double FLOOR = 8.0;            // of stop.py: `floor` in machine epsilons
constexpr int64_t FLOOR_PATIENCE = 5;
constexpr double DIVERGENCE = 1e6;
constexpr int64_t DIVERGENCE_EVERY = 8;

template <class T>
struct Row {  // typed views of the record of one row
    const Context& c;
    int64_t place;
    EQ_INLINE T& of(void* numbers) const { return static_cast<T*>(numbers)[place]; }
    EQ_INLINE T* vector(void* rows) const { return static_cast<T*>(rows) + place * c.n; }
    EQ_INLINE int8_t& status() const { return c.status[place]; }
    EQ_INLINE bool running() const { return c.status[place] == RUNNING; }
    EQ_INLINE int64_t& count() const { return c.count[place]; }
    EQ_INLINE int64_t& limit() const { return c.limit[place]; }
    EQ_INLINE int64_t age(int64_t step) const { return c.own ? step - c.own->born[place] : step; }  // steps since its start
    EQ_INLINE T own(const void* numbers) const { return static_cast<const T*>(numbers)[place]; }
    EQ_INLINE T rtol() const { return c.own ? own(c.own->rtol) : T(c.rtol); }
    EQ_INLINE T atol() const { return c.own ? own(c.own->atol) : T(c.atol); }
    EQ_INLINE T natural() const { return c.own ? own(c.own->natural) : T(c.natural); }
    EQ_INLINE bool watchful() const { return c.own ? c.own->watchful[place] != 0 : c.watchful != 0; }
};

// Reset the record of a row before its first iterate.
template <class T>
EQ_INLINE void begin(const Row<T>& row) {
    const Context& c = row.c;
    const int64_t place = row.place;
    const T inf = std::numeric_limits<T>::infinity();
    c.status[place] = RUNNING;
    c.current[place] = 0;
    c.steps[place] = c.best_step[place] = c.waiting[place] = c.waited[place] = c.count[place] = 0;
    c.limit[place] = c.own ? c.own->limit[place] : c.first_limit;
    row.of(c.excess) = row.of(c.length) = row.of(c.milestone) = inf;
    row.of(c.size) = c.scale ? row.of(c.scale) : T(1);
}

template <class T>
EQ_INLINE bool far_away(const Row<T>& row, T length) {
    T scale = row.of(row.c.first_length), size = row.of(row.c.first_size), natural = row.natural();
    scale = scale > size ? scale : size;
    scale = scale > natural ? scale : natural;
    return length > T(DIVERGENCE) * scale;
}

template <class T>
EQ_INLINE bool stalled(const Row<T>& row) {
    const Context& c = row.c;
    T &milestone = row.of(c.milestone), excess = row.of(c.excess);
    int64_t& waiting = c.waiting[row.place];
    if (excess < T(PROGRESS) * milestone) {
        milestone = excess;
        waiting = 0;
    } else {
        ++waiting;
    }
    bool rounding = row.of(c.length) < T(c.floor) * row.of(c.size) && waiting >= FLOOR_PATIENCE;
    return rounding || (c.patience > 0 && waiting >= c.patience);
}

// Record an iterate with the norm of its residual and the size it is relative to. Returns the ratio of this residual to the
// smallest one before, both divided by their tolerances; 0 at the start.
template <class T>
EQ_INLINE T record(const Row<T>& row, int64_t step, T length, T size) {
    const Context& c = row.c;
    const T inf = std::numeric_limits<T>::infinity();
    if (c.scale) size = row.of(c.scale);
    T excess = length / (size * row.rtol() + row.atol());
    if (step == 0) {
        row.of(c.first_length) = row.of(c.peak) = length;
        row.of(c.first_size) = size;
    }
    // a lower bound of the exact residual: if a state has grown far enough, its residual consists of rounding errors only
    T beyond = length - T(c.floor / FLOOR) * size;
    if (beyond > row.of(c.peak)) row.of(c.peak) = beyond;
    row.of(c.last) = length;
    T before = row.of(c.excess);
    bool better = excess < before;
    if (better) {
        row.of(c.excess) = excess;
        row.of(c.length) = length;
        row.of(c.size) = size;
        c.best_step[row.place] = step;
    }
    c.steps[row.place] = step;
    bool running = excess > 1 && excess < inf;  // false for nan
    Status ended = row.of(c.excess) <= 1 ? CONVERGED : NONFINITE;
    if (running && step > 0 && step % DIVERGENCE_EVERY == 0 && far_away(row, length)) {
        running = false;
        ended = DIVERGED;
    }
    if (row.watchful() && stalled(row) && running) {
        running = false;
        ended = STALLED;
    }
    if (running && c.own && step >= c.own->end[row.place] - c.own->born[row.place]) {
        running = false;
        ended = MAX_STEPS;
    }
    row.status() = running ? RUNNING : ended;
    return step == 0 ? T(0) : excess / before;
}

// Keep the best iterate of a row. It is copied only when a later one is worse and when the row stops.
template <class T>
EQ_INLINE void keep_best(const Row<T>& row, int64_t step, const T* z, const T* before, bool final) {
    const Context& c = row.c;
    uint8_t& current = c.current[row.place];
    T* answer = row.vector(c.answer);
    if (c.best_step[row.place] == step && row.of(c.excess) < std::numeric_limits<T>::infinity()) {
        current = 1;
    } else if (current) {
        copy(answer, before, c.n);
        current = 0;
    } else if (step == 0) {  // a start that is not finite
        for (int64_t i = 0; i < c.n; ++i) answer[i] = std::isfinite(z[i]) ? z[i] : T(0);
    }
    if (current && (final || !row.running())) {
        copy(answer, z, c.n);
        current = 0;
    }
}

}  // namespace equilibria
