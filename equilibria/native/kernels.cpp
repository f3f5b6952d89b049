// Distribution of rows over threads, dispatch by dtype and instruction set, and the binding to Python (stable ABI).
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <thread>

#include "anderson_gram.h"
#include "broyden.h"
#include "finish.h"
#include "gmres.h"
#include "measures.h"

// Compiled for several instruction sets; the loader picks the best one the processor supports.
#if defined(__linux__) && defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(EQUILIBRIA_ONE_TARGET)
#define EQ_TARGETS __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define EQ_TARGETS
#endif

namespace equilibria {

constexpr int64_t WORTH_A_THREAD = 1 << 20;  // numbers read or written in about 100 us; starting a thread takes about 20 us

template <class T>
using Step = void (*)(const Context&, const Call<T>&, int64_t, int64_t, Scratch<T>&);

#define EQ_KERNEL(NAME, T, STEP)                                                                     \
    EQ_TARGETS void NAME(const Context& c, const Call<T>& call, int64_t from, int64_t to) {          \
        thread_local Scratch<T> scratch;                                                             \
        for (int64_t r = from; r < to; ++r) STEP<T>(c, call, r, c.place ? c.place[r] : r, scratch);  \
    }
EQ_KERNEL(picard_f32, float, picard)
EQ_KERNEL(picard_f64, double, picard)
EQ_KERNEL(anderson_f32, float, anderson)
EQ_KERNEL(anderson_f64, double, anderson)
EQ_KERNEL(anderson_gram_f32, float, anderson_gram)
EQ_KERNEL(anderson_gram_f64, double, anderson_gram)
EQ_KERNEL(gmres_begin_f32, float, gmres_begin)
EQ_KERNEL(gmres_begin_f64, double, gmres_begin)
EQ_KERNEL(gmres_f32, float, gmres)
EQ_KERNEL(gmres_f64, double, gmres)
EQ_KERNEL(broyden_f32, float, broyden)
EQ_KERNEL(broyden_f64, double, broyden)

#define EQ_MEASURES(T)                                                                                                   \
    EQ_TARGETS void normalize_rows(int64_t rows, int64_t n, const T* v, T* rhs, T* scale, T* size) {                     \
        normalize<T>(rows, n, v, rhs, scale, size);                                                                      \
    }                                                                                                                    \
    EQ_TARGETS double row_ratios(                                                                                        \
        int64_t rows, int64_t n, const T* a, const T* b, const T* c, const T* told, const int8_t* status, T* out) {      \
        return ratios<T>(rows, n, a, b, c, told, status, out);                                                           \
    }                                                                                                                    \
    EQ_TARGETS bool finite_numbers(const T* x, int64_t count) { return all_finite<T>(x, count); }
EQ_MEASURES(float)
EQ_MEASURES(double)

template <class T>
using Kernel = void (*)(const Context&, const Call<T>&, int64_t, int64_t);

template <class T>
void over_rows(Kernel<T> kernel, const Context& c, const Call<T>& call) {
    int64_t work = c.rows * c.n * (2 * least(c.most, c.slots) + 6) / WORTH_A_THREAD;
    int64_t threads = least(least(c.threads, work), c.rows);
    if (threads <= 1) return kernel(c, call, 0, c.rows);
    std::vector<std::thread> workers;
    for (int64_t i = 1; i < threads; ++i)
        workers.emplace_back(kernel, std::cref(c), std::cref(call), c.rows * i / threads, c.rows * (i + 1) / threads);
    kernel(c, call, 0, c.rows / threads);
    for (std::thread& worker : workers) worker.join();
}

// Count the running rows and list those that stopped in this call; at step 0 also compute the range of their sizes.
template <class T>
int64_t summary(Context& c, int64_t step) {
    int64_t running = 0, wanted = 0, stopped = 0;
    for (int64_t r = 0; r < c.rows; ++r) {
        int64_t place = c.place ? c.place[r] : r;
        if (c.status[place] != RUNNING) {
            if (c.own && c.steps[place] + c.own->born[place] == step) c.own->stopped[stopped++] = r;
            continue;
        }
        ++running;
        int64_t next = least(c.count[place] + 1, c.limit[place]);
        wanted = next > wanted ? next : wanted;
    }
    c.wanted = wanted;
    if (step == 0) {
        c.lowest = std::numeric_limits<double>::infinity();
        c.highest = c.longest = 0;
        for (int64_t r = 0; r < c.batch; ++r) {
            double size = static_cast<T*>(c.first_size)[r], length = static_cast<T*>(c.first_length)[r];
            if (!(size >= c.lowest)) c.lowest = size;  // the negated comparison keeps a nan
            if (!(size <= c.highest)) c.highest = size;
            if (!(length <= c.longest)) c.longest = length;
        }
    }
    return running;
}

enum Method { PICARD, ANDERSON, BROYDEN, GMRES_BEGIN, GMRES, ANDERSON_GRAM };

template <class T>
int64_t run(Context& c, Method method, Call<T> call) {
    static constexpr bool f32 = sizeof(T) == 4;
    Kernel<T> kernel;
    if constexpr (f32) {
        constexpr Kernel<float> all[] = {picard_f32, anderson_f32, broyden_f32, gmres_begin_f32, gmres_f32, anderson_gram_f32};
        kernel = all[method];
    } else {
        constexpr Kernel<double> all[] = {picard_f64, anderson_f64, broyden_f64, gmres_begin_f64, gmres_f64, anderson_gram_f64};
        kernel = all[method];
    }
    over_rows<T>(kernel, c, call);
    if (method == GMRES) std::swap(c.iterate, c.other);
    return summary<T>(c, call.step);
}

}  // namespace equilibria

using namespace equilibria;

static long long integer(PyObject* object) { return PyLong_AsLongLong(object); }

template <class T>
static T* pointer(PyObject* object) { return reinterpret_cast<T*>(integer(object)); }

template <class T>
static int64_t called(Context& c, Method method, PyObject* const* a, int64_t step) {
    return run<T>(c, method, Call<T>{pointer<T>(a[3]), pointer<T>(a[4]), pointer<T>(a[5]), pointer<T>(a[6]), step});
}

static bool counted(const char* name, Py_ssize_t count, Py_ssize_t wanted) {
    if (count != wanted) PyErr_Format(PyExc_TypeError, "%s takes %zd numbers, got %zd", name, wanted, count);
    return count == wanted;
}

// advance(context, method, double, a, b, before, out, step) -> number of running rows; addresses are integers
static PyObject* advance(PyObject*, PyObject* const* a, Py_ssize_t count) {
    if (!counted("advance", count, 8)) return nullptr;
    Context& c = *pointer<Context>(a[0]);
    const Method method = Method(integer(a[1]));
    const bool wide = integer(a[2]) != 0;
    const int64_t step = integer(a[7]);
    if (PyErr_Occurred()) return nullptr;
    int64_t running;
    Py_BEGIN_ALLOW_THREADS
    running = wide ? called<double>(c, method, a, step) : called<float>(c, method, a, step);
    Py_END_ALLOW_THREADS
    return PyLong_FromLongLong(running);
}

// finish(context, double) -> number of rows that may have failed; overwrites `excess` with relative residuals
static PyObject* finish_rows(PyObject*, PyObject* const* a, Py_ssize_t count) {
    if (!counted("finish", count, 2)) return nullptr;
    const Context& c = *pointer<const Context>(a[0]);
    const bool wide = integer(a[1]) != 0;
    if (PyErr_Occurred()) return nullptr;
    return PyLong_FromLongLong(wide ? finish<double>(c) : finish<float>(c));
}

template <class T>
static void normalize_at(PyObject* const* a) {
    normalize_rows(integer(a[1]), integer(a[2]), pointer<const T>(a[3]), pointer<T>(a[4]), pointer<T>(a[5]), pointer<T>(a[6]));
}

// normalize(double, rows, n, v, rhs, scale, size)
static PyObject* normalize_all(PyObject*, PyObject* const* a, Py_ssize_t count) {
    if (!counted("normalize", count, 7)) return nullptr;
    if (integer(a[0]) != 0) normalize_at<double>(a);
    else normalize_at<float>(a);
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
}

template <class T>
static double ratios_at(PyObject* const* a) {
    return row_ratios(
        integer(a[1]), integer(a[2]), pointer<const T>(a[3]), pointer<const T>(a[4]), pointer<const T>(a[5]),
        pointer<const T>(a[6]), pointer<const int8_t>(a[7]), pointer<T>(a[8]));
}

// ratios(double, rows, n, a, b, c, told, status, out) -> the largest; b, told and status may be 0
static PyObject* ratios_all(PyObject*, PyObject* const* a, Py_ssize_t count) {
    if (!counted("ratios", count, 9)) return nullptr;
    const double worst = integer(a[0]) != 0 ? ratios_at<double>(a) : ratios_at<float>(a);
    return PyErr_Occurred() ? nullptr : PyFloat_FromDouble(worst);
}

// finite(double, numbers, count) -> True if all are finite
static PyObject* finite_all(PyObject*, PyObject* const* a, Py_ssize_t count) {
    if (!counted("finite", count, 3)) return nullptr;
    const bool wide = integer(a[0]) != 0;
    const int64_t numbers = integer(a[2]);
    const bool found = wide ? finite_numbers(pointer<const double>(a[1]), numbers) : finite_numbers(pointer<const float>(a[1]), numbers);
    return PyErr_Occurred() ? nullptr : PyBool_FromLong(found);
}

#define EQ_METHOD(NAME, FUNCTION, DOC) \
    {NAME, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(FUNCTION)), METH_FASTCALL, DOC}

static PyMethodDef methods[] = {
    EQ_METHOD("normalize", normalize_all, "normalize(double, rows, n, v, rhs, scale, size)"),
    EQ_METHOD("ratios", ratios_all, "ratios(double, rows, n, a, b, c, told, status, out) -> the largest"),
    EQ_METHOD("finite", finite_all, "finite(double, numbers, count) -> True if all are finite"),
    EQ_METHOD("finish", finish_rows, "finish(context, double) -> rows that are not simply converged"),
    EQ_METHOD("advance", advance, "advance(context, method, double, a, b, before, out, step) -> rows still running"),
    {nullptr, nullptr, 0, nullptr}};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_kernels", nullptr, 0, methods, nullptr, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit__kernels() {
    PyObject* module = PyModule_Create(&definition);
    if (module) {
        PyModule_AddIntConstant(module, "context_size", long(sizeof(Context)));
        PyModule_AddIntConstant(module, "interface", INTERFACE);
    }
    return module;
}
