// Distribution of rows over threads, dispatch by dtype and instruction set, and the binding to Python (stable ABI).
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <thread>

#include "anderson_gram.h"
#include "broyden.h"
#include "finish.h"
#include "gmres.h"

// Compiled for several instruction sets; the loader picks the best one the processor supports.
#if defined(__linux__) && defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(EQUILIBRIA_ONE_TARGET)
#define EQ_TARGETS __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define EQ_TARGETS
#endif

namespace equilibria {

constexpr int64_t WORTH_A_THREAD = 1 << 20;  // numbers read or written: some 100 us of work, starting a thread takes 20

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
            if (!(size >= c.lowest)) c.lowest = size;  // a nan stays
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

// advance(context, method, double, a, b, before, out, step) -> rows still running; addresses are integers
static PyObject* advance(PyObject*, PyObject* const* a, Py_ssize_t count) {
    if (count != 8) {
        PyErr_Format(PyExc_TypeError, "advance takes 8 numbers, got %zd", count);
        return nullptr;
    }
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

// finish(context, double) -> rows that are not simply converged; writes the relative residuals over `excess`
static PyObject* finish_rows(PyObject*, PyObject* const* a, Py_ssize_t count) {
    if (count != 2) {
        PyErr_Format(PyExc_TypeError, "finish takes 2 numbers, got %zd", count);
        return nullptr;
    }
    const Context& c = *pointer<const Context>(a[0]);
    const bool wide = integer(a[1]) != 0;
    if (PyErr_Occurred()) return nullptr;
    return PyLong_FromLongLong(wide ? finish<double>(c) : finish<float>(c));
}

static PyMethodDef methods[] = {
    {"finish", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(finish_rows)), METH_FASTCALL,
     "finish(context, double) -> rows that are not simply converged"},
    {"advance", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(advance)), METH_FASTCALL,
     "advance(context, method, double, a, b, before, out, step) -> rows still running"},
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
