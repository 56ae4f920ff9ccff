/* libcuda.so.1 as a DOUBLE over host memory: it lets KvikIO run its whole device path on a machine without a GPU.
 *
 * It implements the driver functions that KvikIO loads (kvikio/shim/cuda.hpp) and the few that gdskv calls itself. It
 * knows memory, streams and events; it must not know KvikIO or gdskv. What passes over it is a statement about logic,
 * order and faults, and never about speed or about GPUDirect: results say "hostdriver".
 *
 * "Device" memory is mapped host memory that answers as device memory. Work on a stream is done late, by that stream's
 * own thread, and a copy reads its source when it runs: who forgets to synchronise sees wrong bytes. Streams do not
 * wait for each other, not even for the default one, which is looser than the real driver.
 *
 * Settings, each an environment variable HOSTDRIVER_<NAME> and a call hostdriver_set("<name>", value):
 *   fail_alloc   the next N allocations and registrations fail (out of memory)
 *   fail_copy    the next N copies or kernels fail when they are handed over
 *   fail_late    the next N copies or kernels fail when they run: the next event or synchronisation of their stream
 *                reports it
 *   delay_us     each copy and each kernel waits so long before it runs
 *
 * A kernel is a function on the CPU, on the stream's thread: the handle of one is the address of a struct kernel. It does
 * not run after a failure on its stream that nobody has heard of yet.
 *   version      what cuDriverGetVersion says (12080; below 12080 KvikIO does without cuMemcpyBatchAsync)
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
enum { SUCCESS = 0, INVALID = 1, NO_MEMORY = 2, NOT_READY = 600, ALREADY = 712, NOT_REGISTERED = 713, UNKNOWN = 999 };
enum { ATTRIBUTE_CONTEXT = 1, ATTRIBUTE_TYPE = 2, ATTRIBUTE_DEVICE_PTR = 3, ATTRIBUTE_HOST_PTR = 4, ATTRIBUTE_ORDINAL = 9 };
enum { UNREGISTERED = 0, HOST = 1, DEVICE = 2 };
#define HUGE ((size_t)2 << 20)
#define EXPORT __attribute__((visibility("default")))

/* ---- settings and counts ---- */

static const char *const names[] = {"fail_alloc", "fail_copy", "fail_late", "delay_us", "version"};
enum { FAIL_ALLOC, FAIL_COPY, FAIL_LATE, DELAY_US, VERSION, SETTINGS };
static long settings[SETTINGS];
enum { COPIES, BATCH_COPIES, BYTES, PINNED, KERNELS, COUNTS };
static const char *const count_names[] = {"copies", "batch_copies", "bytes", "pinned", "kernels"};
static long counts[COUNTS];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void from_environment(void) {
    settings[VERSION] = 12080;
    for (int i = 0; i < SETTINGS; i++) {
        char name[64] = "HOSTDRIVER_";
        size_t n = strlen(name);
        for (const char *c = names[i]; *c; c++) name[n++] = (char)toupper(*c);
        name[n] = 0;
        const char *value = getenv(name);
        if (value) settings[i] = atol(value);
    }
}

EXPORT int hostdriver_set(const char *name, long value) {
    pthread_once(&once, from_environment);
    for (int i = 0; i < SETTINGS; i++)
        if (!strcmp(name, names[i])) return __atomic_store_n(&settings[i], value, __ATOMIC_SEQ_CST), 0;
    return -1;
}

/* How often, since the start: "copies", "batch_copies", "bytes", "kernels"; and "pinned": ranges of host memory pinned now. */
EXPORT long hostdriver_count(const char *name) {
    for (int i = 0; i < COUNTS; i++)
        if (!strcmp(name, count_names[i])) return __atomic_load_n(&counts[i], __ATOMIC_SEQ_CST);
    return -1;
}

static void count(int what, long by) { __atomic_fetch_add(&counts[what], by, __ATOMIC_SEQ_CST); }

/* Whether this one fails: takes one off the setting. */
static int fails(int setting) {
    pthread_once(&once, from_environment);
    long left = __atomic_load_n(&settings[setting], __ATOMIC_SEQ_CST);
    while (left > 0)
        if (__atomic_compare_exchange_n(&settings[setting], &left, left - 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            return 1;
    return 0;
}

/* ---- ranges of memory that the driver knows ---- */

struct range { uintptr_t base; size_t size; int type, mapped; };
static struct range ranges[65536];
static int n_ranges;
static pthread_mutex_t ranges_lock = PTHREAD_MUTEX_INITIALIZER;

static int known(uintptr_t p, struct range *out) {
    int found = 0;
    pthread_mutex_lock(&ranges_lock);
    for (int i = 0; i < n_ranges && !found; i++)
        if (p >= ranges[i].base && p - ranges[i].base < ranges[i].size) *out = ranges[i], found = 1;
    pthread_mutex_unlock(&ranges_lock);
    return found;
}

static CUresult add(uintptr_t base, size_t size, int type, int mapped) {
    CUresult result = NO_MEMORY;
    pthread_mutex_lock(&ranges_lock);
    if (n_ranges < (int)(sizeof ranges / sizeof *ranges)) {
        ranges[n_ranges++] = (struct range){base, size, type, mapped};
        result = SUCCESS;
    }
    pthread_mutex_unlock(&ranges_lock);
    if (result == SUCCESS && type == HOST) count(PINNED, 1);
    return result;
}

static CUresult drop(uintptr_t base, int type) {
    struct range gone = {0};
    pthread_mutex_lock(&ranges_lock);
    for (int i = 0; i < n_ranges; i++)
        if (ranges[i].base == base && ranges[i].type == type) {
            gone = ranges[i];
            ranges[i] = ranges[--n_ranges];
            break;
        }
    pthread_mutex_unlock(&ranges_lock);
    if (!gone.size) return INVALID;
    if (type == HOST) count(PINNED, -1);
    if (gone.mapped) munmap((void *)gone.base, gone.size);
    return SUCCESS;
}

static CUresult map(uintptr_t *out, size_t size, int type) {
    if (!size) return INVALID;
    if (fails(FAIL_ALLOC)) return NO_MEMORY;
    size = (size + 4095) & ~(size_t)4095;
    /* From a multiple of 2 MiB on, in huge pages: neither a GPU's memory nor pinned memory costs a page fault for every 4 KiB */
    size_t spare = size >= HUGE ? HUGE : 0;
    char *p = mmap(NULL, size + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return NO_MEMORY;
    if (spare) {
        size_t before = -(uintptr_t)p & (HUGE - 1);
        if (before) munmap(p, before);
        p += before;
        if (spare > before) munmap(p + size, spare - before);
        madvise(p, size, MADV_HUGEPAGE);
    }
    *out = (uintptr_t)p;
    return add((uintptr_t)p, size, type, 1);
}

/* Memory that the caller mapped answers as device memory from now on (a pool that a test must be able to look into). */
EXPORT CUresult hostdriver_adopt(CUdeviceptr base, size_t size) { return add(base, size, DEVICE, 0); }
EXPORT CUresult hostdriver_disown(CUdeviceptr base) { return drop(base, DEVICE); }

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *p, size_t n) { uintptr_t a = 0; CUresult r = map(&a, n, DEVICE); *p = a; return r; }
EXPORT CUresult cuMemFree_v2(CUdeviceptr p) { return drop(p, DEVICE); }
EXPORT CUresult cuMemHostAlloc(void **p, size_t n, unsigned flags) { (void)flags; uintptr_t a = 0; CUresult r = map(&a, n, HOST); *p = (void *)a; return r; }
EXPORT CUresult cuMemFreeHost(void *p) { return drop((uintptr_t)p, HOST); }

EXPORT CUresult cuMemHostRegister_v2(void *p, size_t n, unsigned flags) {
    (void)flags;
    struct range r;
    if (known((uintptr_t)p, &r)) return ALREADY;
    return fails(FAIL_ALLOC) ? NO_MEMORY : add((uintptr_t)p, n, HOST, 0);
}
EXPORT CUresult cuMemHostUnregister(void *p) { return drop((uintptr_t)p, HOST) ? NOT_REGISTERED : SUCCESS; }

EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr p) {
    struct range r;
    if (!known(p, &r)) return INVALID;
    if (base) *base = r.base;
    if (size) *size = r.size;
    return SUCCESS;
}

/* ---- devices and contexts: one of each ---- */

struct context { int unused; };
static struct context primary;
static __thread struct context *stack[64];
static __thread int depth;

EXPORT CUresult cuInit(unsigned flags) { (void)flags; return SUCCESS; }
EXPORT CUresult cuDriverGetVersion(int *v) { pthread_once(&once, from_environment); *v = (int)settings[VERSION]; return SUCCESS; }
EXPORT CUresult cuDeviceGetCount(int *n) { *n = 1; return SUCCESS; }
EXPORT CUresult cuDeviceGet(CUdevice *d, int ordinal) { *d = 0; return ordinal ? INVALID : SUCCESS; }
EXPORT CUresult cuDeviceGetAttribute(int *v, int what, CUdevice d) { (void)what, (void)d; *v = 0; return SUCCESS; }
EXPORT CUresult cuDeviceGetName(char *name, int n, CUdevice d) { (void)d; snprintf(name, (size_t)n, "hostdriver (host memory, a double)"); return SUCCESS; }
EXPORT CUresult cuDeviceGetPCIBusId(char *id, int n, CUdevice d) { (void)d; if (n) *id = 0; return INVALID; }
EXPORT CUresult cuDeviceTotalMem_v2(size_t *n, CUdevice d) { (void)d; *n = (size_t)sysconf(_SC_PHYS_PAGES) * 4096; return SUCCESS; }
EXPORT CUresult cuDevicePrimaryCtxRetain(struct context **c, CUdevice d) { (void)d; *c = &primary; return SUCCESS; }
EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice d) { (void)d; return SUCCESS; }
EXPORT CUresult cuCtxGetCurrent(struct context **c) { *c = depth ? stack[depth - 1] : NULL; return SUCCESS; }
EXPORT CUresult cuCtxGetDevice(CUdevice *d) { *d = 0; return depth ? SUCCESS : 201; }
EXPORT CUresult cuCtxPushCurrent_v2(struct context *c) { if (depth == 64) return INVALID; stack[depth++] = c; return SUCCESS; }
EXPORT CUresult cuCtxPopCurrent_v2(struct context **c) { if (!depth) return 201; depth--; if (c) *c = stack[depth]; return SUCCESS; }
EXPORT CUresult cuCtxSetCurrent(struct context *c) { if (depth) depth--; return c ? cuCtxPushCurrent_v2(c) : SUCCESS; }
EXPORT CUresult cuCtxCreate_v2(struct context **c, unsigned flags, CUdevice d) { (void)flags, (void)d; *c = calloc(1, sizeof **c); return cuCtxPushCurrent_v2(*c); }
EXPORT CUresult cuCtxCreate_v4(struct context **c, void *params, unsigned flags, CUdevice d) { (void)params; return cuCtxCreate_v2(c, flags, d); }
EXPORT CUresult cuCtxDestroy_v2(struct context *c) { if (depth && stack[depth - 1] == c) depth--; free(c); return SUCCESS; }

EXPORT CUresult cuPointerGetAttribute(void *out, int what, CUdeviceptr p) {
    struct range r;
    if (!known(p, &r)) return INVALID;
    switch (what) {
    case ATTRIBUTE_CONTEXT: *(struct context **)out = &primary; return SUCCESS;
    case ATTRIBUTE_TYPE: *(unsigned *)out = (unsigned)r.type; return SUCCESS;
    case ATTRIBUTE_DEVICE_PTR: *(CUdeviceptr *)out = p; return SUCCESS;
    case ATTRIBUTE_HOST_PTR: if (r.type != HOST) return INVALID; *(CUdeviceptr *)out = p; return SUCCESS;
    case ATTRIBUTE_ORDINAL: *(int *)out = 0; return SUCCESS;
    default: return INVALID;
    }
}

/* Unlike the singular, it succeeds for memory that the driver does not know, and writes zero. */
EXPORT CUresult cuPointerGetAttributes(unsigned n, int *what, void **out, CUdeviceptr p) {
    for (unsigned i = 0; i < n; i++)
        if (cuPointerGetAttribute(out[i], what[i], p) != SUCCESS)
            memset(out[i], 0, what[i] == ATTRIBUTE_TYPE || what[i] == ATTRIBUTE_ORDINAL ? 4 : 8);
    return SUCCESS;
}

/* ---- streams: a queue and a thread each ---- */

struct event { long recorded, reached; CUresult error; };
struct kernel { void (*run)(const void *parameter, unsigned grid_x, unsigned grid_y); size_t parameter_bytes; };
struct op {
    struct op *next;
    struct event *event; /* to be reached; or to be waited for, until it was reached `until` times */
    long until;
    void (*call)(void *);
    void *data;
    const struct kernel *kernel; /* of the grid, with its parameter in `to`, which is ours */
    unsigned grid[2];
    void *to;
    const void *from;
    size_t size;
};
struct stream {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct op *first, **last;
    long queued, finished;
    CUresult error;
    int stop;
};
static struct stream *default_stream;
static pthread_mutex_t default_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t event_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t event_reached = PTHREAD_COND_INITIALIZER;

static CUresult run(struct op *op, CUresult before) {
    if (op->call) {
        op->call(op->data);
    } else if (op->event && op->until) {
        pthread_mutex_lock(&event_lock);
        while (op->event->reached < op->until) pthread_cond_wait(&event_reached, &event_lock);
        pthread_mutex_unlock(&event_lock);
    } else if (op->event) {
        pthread_mutex_lock(&event_lock);
        op->event->reached++;
        op->event->error = before;
        pthread_cond_broadcast(&event_reached);
        pthread_mutex_unlock(&event_lock);
    } else {
        long delay = __atomic_load_n(&settings[DELAY_US], __ATOMIC_SEQ_CST);
        if (delay > 0) usleep((useconds_t)delay);
        CUresult failed = fails(FAIL_LATE) ? UNKNOWN : SUCCESS;
        if (op->kernel) {
            if (!failed) failed = before; /* what it would work on may not be there */
            if (!failed) op->kernel->run(op->to, op->grid[0], op->grid[1]);
            free(op->to);
        } else if (!failed) {
            memcpy(op->to, op->from, op->size);
        }
        return failed;
    }
    return SUCCESS;
}

static void *serve(void *argument) {
    struct stream *s = argument;
    pthread_mutex_lock(&s->lock);
    while (1) {
        while (!s->first && !s->stop) pthread_cond_wait(&s->changed, &s->lock);
        struct op *op = s->first;
        if (!op) break;
        s->first = op->next;
        if (!s->first) s->last = &s->first;
        pthread_mutex_unlock(&s->lock);
        int event = op->event && !op->call && !op->until;
        CUresult result = run(op, s->error); /* only this thread sets an error */
        free(op);
        pthread_mutex_lock(&s->lock);
        if (result || event) s->error = result; /* an event takes the error along, as a synchronisation does */
        s->finished++;
        pthread_cond_broadcast(&s->changed);
    }
    pthread_mutex_unlock(&s->lock);
    free(s);
    return NULL;
}

EXPORT CUresult cuStreamCreate(struct stream **out, unsigned flags) {
    (void)flags;
    struct stream *s = calloc(1, sizeof *s);
    if (!s) return NO_MEMORY;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->changed, NULL);
    s->last = &s->first;
    pthread_t thread;
    if (pthread_create(&thread, NULL, serve, s)) return free(s), NO_MEMORY;
    pthread_detach(thread);
    *out = s;
    return SUCCESS;
}

/* What is queued still runs, as in the real driver. */
EXPORT CUresult cuStreamDestroy_v2(struct stream *s) {
    if (!s) return INVALID;
    pthread_mutex_lock(&s->lock);
    s->stop = 1;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    return SUCCESS;
}

static struct stream *real(struct stream *s) {
    if (s && s != (void *)1 && s != (void *)2) return s; /* 1 and 2 are the default streams' other names */
    pthread_mutex_lock(&default_lock);
    if (!default_stream) cuStreamCreate(&default_stream, 0);
    s = default_stream;
    pthread_mutex_unlock(&default_lock);
    return s;
}

static CUresult queue(struct stream *s, struct op op) {
    s = real(s);
    struct op *copy = malloc(sizeof op);
    if (!s || !copy) return free(copy), NO_MEMORY;
    *copy = op;
    copy->next = NULL;
    pthread_mutex_lock(&s->lock);
    *s->last = copy;
    s->last = &copy->next;
    s->queued++;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    return SUCCESS;
}

EXPORT CUresult cuStreamSynchronize(struct stream *s) {
    s = real(s);
    pthread_mutex_lock(&s->lock);
    long until = s->queued;
    while (s->finished < until) pthread_cond_wait(&s->changed, &s->lock);
    CUresult result = s->error;
    s->error = SUCCESS; /* the real driver would end the context here; a double goes on, so that recovery is tested */
    pthread_mutex_unlock(&s->lock);
    return result;
}

static CUresult copy(uintptr_t to, uintptr_t from, size_t size, struct stream *s) {
    if (fails(FAIL_COPY)) return UNKNOWN;
    count(COPIES, 1);
    count(BYTES, (long)size);
    return queue(s, (struct op){.to = (void *)to, .from = (const void *)from, .size = size});
}

EXPORT CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t n, struct stream *s) { return copy(to, from, n, s); }
EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t n, struct stream *s) { return copy(to, (uintptr_t)from, n, s); }
EXPORT CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t n, struct stream *s) { return copy((uintptr_t)to, from, n, s); }
EXPORT CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t n) { CUresult r = copy(to, from, n, NULL); return r ? r : cuStreamSynchronize(NULL); }

EXPORT CUresult cuMemcpyBatchAsync(CUdeviceptr *to, CUdeviceptr *from, size_t *n, size_t number, void *attributes,
                                   size_t *indices, size_t n_attributes, size_t *failed, struct stream *s) {
    (void)attributes, (void)indices, (void)n_attributes;
    if (!s || !number) return INVALID; /* the real one refuses the default stream too */
    for (size_t i = 0; i < number; i++) {
        CUresult r = copy(to[i], from[i], n[i], s);
        if (r) return failed ? (*failed = i, r) : r;
        count(BATCH_COPIES, 1);
    }
    return SUCCESS;
}
EXPORT CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *to, CUdeviceptr *from, size_t *n, size_t number, void *attributes,
                                      size_t *indices, size_t n_attributes, struct stream *s) {
    return cuMemcpyBatchAsync(to, from, n, number, attributes, indices, n_attributes, NULL, s);
}

/* The parameter is copied by the call, as the real driver does. */
EXPORT CUresult cuLaunchKernel(const struct kernel *k, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned x, unsigned y,
                               unsigned z, unsigned shared, struct stream *s, void **parameters, void **extra) {
    (void)x, (void)y, (void)z, (void)shared, (void)extra;
    if (!k || !grid_x || !grid_y || grid_z != 1) return INVALID;
    if (fails(FAIL_COPY)) return UNKNOWN;
    void *parameter = malloc(k->parameter_bytes);
    if (!parameter) return NO_MEMORY;
    memcpy(parameter, parameters[0], k->parameter_bytes);
    count(KERNELS, 1);
    return queue(s, (struct op){.kernel = k, .grid = {grid_x, grid_y}, .to = parameter});
}

EXPORT CUresult cuLaunchHostFunc(struct stream *s, void (*call)(void *), void *data) { return queue(s, (struct op){.call = call, .data = data}); }

EXPORT CUresult cuEventCreate(struct event **e, unsigned flags) { (void)flags; *e = calloc(1, sizeof **e); return *e ? SUCCESS : NO_MEMORY; }
EXPORT CUresult cuEventDestroy_v2(struct event *e) { (void)e; return SUCCESS; } /* leaks 16 bytes: a stream may hold it */
EXPORT CUresult cuEventRecord(struct event *e, struct stream *s) {
    pthread_mutex_lock(&event_lock);
    e->recorded++;
    pthread_mutex_unlock(&event_lock);
    return queue(s, (struct op){.event = e});
}
EXPORT CUresult cuStreamWaitEvent(struct stream *s, struct event *e, unsigned flags) {
    (void)flags;
    pthread_mutex_lock(&event_lock);
    long until = e->recorded;
    pthread_mutex_unlock(&event_lock);
    return until ? queue(s, (struct op){.event = e, .until = until}) : SUCCESS;
}
EXPORT CUresult cuEventQuery(struct event *e) {
    pthread_mutex_lock(&event_lock);
    CUresult r = e->reached < e->recorded ? NOT_READY : e->error;
    pthread_mutex_unlock(&event_lock);
    return r;
}
EXPORT CUresult cuEventSynchronize(struct event *e) {
    pthread_mutex_lock(&event_lock);
    while (e->reached < e->recorded) pthread_cond_wait(&event_reached, &event_lock);
    pthread_mutex_unlock(&event_lock);
    return SUCCESS;
}

/* ---- names of errors ---- */

static const char *name_of(CUresult r) {
    switch (r) {
    case SUCCESS: return "CUDA_SUCCESS";
    case INVALID: return "CUDA_ERROR_INVALID_VALUE";
    case NO_MEMORY: return "CUDA_ERROR_OUT_OF_MEMORY";
    case NOT_READY: return "CUDA_ERROR_NOT_READY";
    case 201: return "CUDA_ERROR_INVALID_CONTEXT";
    case ALREADY: return "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED";
    case NOT_REGISTERED: return "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED";
    default: return "CUDA_ERROR_UNKNOWN";
    }
}
EXPORT CUresult cuGetErrorName(CUresult r, const char **out) { *out = name_of(r); return SUCCESS; }
EXPORT CUresult cuGetErrorString(CUresult r, const char **out) { *out = name_of(r); return SUCCESS; }
