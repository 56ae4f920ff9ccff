/* Runs a CUDA grid as loops on the CPU, for kernels that are written in phases: all threads of a block do a phase, one after
 * the other, before any begins the next, which is what the barrier at a phase's end is on a GPU. Two orders of the threads:
 * a kernel whose threads meddle with each other within a phase gives different bytes in them.
 *
 * A DOUBLE of a GPU: it shows a kernel's logic, never its speed. Knows grids; must not know what a kernel does.
 */
#include <atomic>
#include <cstddef>
#include <cstring>

#define __device__ static
#define __shared__ static thread_local

struct HostDim {
    unsigned x, y;
};
static thread_local HostDim blockIdx, gridDim;
static std::atomic<int> backwards{0};

extern "C" __attribute__((visibility("default"))) void hostgrid_backwards(int on) { backwards = on; }

#define PHASE(t)                                                                                 \
    for (unsigned phase_i = 0, t = backwards ? THREADS - 1 : 0; phase_i < THREADS;               \
         phase_i++, t = backwards ? THREADS - 1 - phase_i : phase_i)

/* What the CUDA driver double launches: a function, and how many bytes its one parameter has. */
struct HostKernel {
    void (*run)(const void *parameter, unsigned grid_x, unsigned grid_y);
    size_t parameter_bytes;
};

#define KERNEL(name, grain, gather)                                                              \
    static void run_##name(const void *parameter, unsigned grid_x, unsigned grid_y) {            \
        Job job;                                                                                 \
        memcpy(&job, parameter, sizeof job);                                                     \
        gridDim = {grid_x, grid_y};                                                              \
        for (blockIdx.y = 0; blockIdx.y < grid_y; blockIdx.y++)                                  \
            for (blockIdx.x = 0; blockIdx.x < grid_x; blockIdx.x++) move<grain, gather>(job);    \
    }                                                                                            \
    extern "C" __attribute__((visibility("default"))) const HostKernel name = {run_##name, sizeof(Job)};
