/* Gather and scatter: blocks of KV between the pages of an engine and extents, many blocks in one launch.
 *
 * An extent is a block as it lies on disk: its bytes in order, then zeros up to the end of its slot. In the engine's pages
 * the same bytes lie in pieces, all of one size. A thread moves units of 16 bytes; on the side of the pages in grains, the
 * largest of 16, 4 and 1 bytes that every piece's size and address is a multiple of.
 *
 * CRC-32C in the same pass. A checksum without its initial value and final inversion is linear: that of a whole is the sum
 * (xor) of its parts', each multiplied by x^(8 * bytes that follow it) modulo the polynomial. So a thread sums up its units,
 * which lie THREADS units apart; the threads of a chunk are summed up in halves; and the chunk's sum goes out multiplied for
 * what follows it in the extent. Who launches adds the chunks up and puts initial value and inversion in. Zeros in front
 * change nothing, so chunks are counted from the end of the extent and the first may be short.
 *
 * The same source is compiled for CPUs, where a grid runs as loops (cuda/hostgrid): so threads share nothing but the arrays
 * in shared memory, and those only from one PHASE to a later one. A phase ends in a barrier.
 */
#ifdef __CUDACC__
#define PHASE(t) for (unsigned t = threadIdx.x, once = 1; once; once = 0, __syncthreads())
#define KERNEL(name, grain, gather) \
    extern "C" __global__ void __launch_bounds__(THREADS) name(const Job job) { move<grain, gather>(job); }
#else
#include "hostgrid.h"
#endif

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

enum : u32 { THREADS = 256, UNIT = 16, SLICES = UNIT, TABLES = SLICES + 4, HALVINGS = 8, POLYNOMIAL = 0x82F63B78u };

struct Piece {
    u64 address; /* in page 0 */
    u32 page;    /* which of the block's pages it lies in */
    u32 unused;
};

struct Job {
    u64 pieces;      /* Piece[bytes / piece_bytes], in the order of the block's bytes */
    u64 pages;       /* u32[blocks][pages_per_block] */
    u64 extents;     /* u64[blocks]: addresses, multiples of 16 */
    u64 tables;      /* u32[TABLES][256]; 0: no checksums */
    u64 factors;     /* u32[HALVINGS + chunks]: for THREADS / 2 units that follow, THREADS / 4, .. 1; then each chunk's */
    u64 sums;        /* u32[blocks][chunks], written */
    u64 page_stride; /* bytes */
    u32 piece_bytes;
    u32 pages_per_block;
    u32 bytes;        /* of a block */
    u32 extent_bytes; /* a multiple of 16, `bytes` or more */
    u32 rounds;       /* units of one thread */
    u32 unused;
};

struct alignas(16) Unit {
    u32 words[4];
};

/* a * b modulo the polynomial; bit 31 is x^0, as CRC-32C has it. */
__device__ inline u32 multiply(u32 a, u32 b) {
    u32 product = 0;
    for (int i = 0; i < 32; i++) {
        product ^= b & (0u - (a >> 31));
        a <<= 1;
        b = (b >> 1) ^ (POLYNOMIAL & (0u - (b & 1)));
    }
    return product;
}

/* The sum with THREADS units that follow, and the last of those added. */
__device__ inline u32 add(const u32 (*tables)[256], u32 sum, const Unit &unit) {
    u32 result = 0;
#pragma unroll
    for (u32 i = 0; i < 4; i++) result ^= tables[SLICES + i][sum >> 8 * i & 0xFF];
#pragma unroll
    for (u32 i = 0; i < UNIT; i++) result ^= tables[UNIT - 1 - i][unit.words[i / 4] >> 8 * (i % 4) & 0xFF];
    return result;
}

/* Bytes `at` to `at` + 16 of a block between `unit` and its pages; what lies beyond the block is left alone. */
template <typename Grain, bool gather>
__device__ inline void touch_pages(const Job &job, const u32 *pages, u32 at, Unit &unit) {
    if (at >= job.bytes) return;
    const Piece *piece = (const Piece *)job.pieces + at / job.piece_bytes;
    u32 within = at % job.piece_bytes;
    u64 address = piece->address + pages[piece->page] * job.page_stride;
#pragma unroll
    for (u32 i = 0; i < UNIT; i += sizeof(Grain)) {
        if (at + i < job.bytes) {
            if (within == job.piece_bytes) {
                within = 0;
                piece++;
                address = piece->address + pages[piece->page] * job.page_stride;
            }
            Grain *grain = (Grain *)(address + within);
            if constexpr (sizeof(Grain) == sizeof(Unit)) {
                if (gather) unit = *(Unit *)grain;
                else *(Unit *)grain = unit;
            } else {
                u32 &word = unit.words[i / 4];
                const u32 shift = 8 * (i % 4);
                if (gather) word |= (u32)*grain << shift;
                else *grain = (Grain)(word >> shift);
            }
        }
        within += sizeof(Grain);
    }
}

template <typename Grain, bool gather> __device__ inline void move(const Job &job) {
    __shared__ u32 tables[TABLES][256];
    __shared__ u32 sums[THREADS];
    const u32 *pages = (const u32 *)job.pages + (u64)blockIdx.y * job.pages_per_block;
    const u64 extent = ((const u64 *)job.extents)[blockIdx.y];
    const u32 units = job.extent_bytes / UNIT;
    const u32 after = (gridDim.x - 1 - blockIdx.x) * job.rounds * THREADS; /* units that follow this chunk */
    const bool checked = job.tables != 0;

    if (checked) {
        PHASE(t) {
            for (u32 i = t; i < TABLES * 256; i += THREADS) tables[i / 256][i % 256] = ((const u32 *)job.tables)[i];
        }
    }
    PHASE(t) {
        u32 sum = 0;
        for (u32 round = job.rounds; round-- > 0;) {
            const u32 back = after + round * THREADS + (THREADS - 1 - t);
            if (back >= units) continue; /* before the extent's first unit; the sum is still 0 */
            const u32 at = (units - 1 - back) * UNIT;
            Unit *here = (Unit *)(extent + at);
            Unit unit = {{0, 0, 0, 0}};
            if (!gather) unit = *here;
            touch_pages<Grain, gather>(job, pages, at, unit);
            if (gather) *here = unit;
            if (checked) sum = add(tables, sum, unit);
        }
        sums[t] = sum;
    }
    if (!checked) return;
    const u32 *factors = (const u32 *)job.factors;
    for (u32 level = 0; level < HALVINGS; level++) {
        const u32 half = THREADS >> (level + 1);
        PHASE(t) {
            if (t < half) sums[t] = multiply(sums[t], factors[level]) ^ sums[t + half];
        }
    }
    PHASE(t) {
        if (t == 0)
            ((u32 *)job.sums)[(u64)blockIdx.y * gridDim.x + blockIdx.x] =
                multiply(sums[0], factors[HALVINGS + blockIdx.x]);
    }
}

KERNEL(gather_16, Unit, true)
KERNEL(gather_4, u32, true)
KERNEL(gather_1, u8, true)
KERNEL(scatter_16, Unit, false)
KERNEL(scatter_4, u32, false)
KERNEL(scatter_1, u8, false)
