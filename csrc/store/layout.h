/* layout.h: where everything is in a segment. Offsets follow from the geometry alone, so an attach computes
 * them again and trusts no offset that it reads.
 *
 *     header | tensors | groups | slots | words | saved | owners | view owners | views | buffers |
 *     staging | residuals
 *
 * The file has room for all of that for max_participants. The spares of a slot and the headers of its staging
 * buffers are holes until a participant joins in it. The rest of a staging buffer, gradient, codes
 * and ranges, and the slot's residuals are holes until they are used, and then only as far as they are.
 */
#ifndef PYPS_LAYOUT_H
#define PYPS_LAYOUT_H

#include "store/atomics.h"
#include "pyps.h"

#define SEGMENT_MAGIC "pyps\r\n\x1a" /* 7 bytes and NUL: text-mode damage shows */
#define ENDIAN_MARK   UINT32_C(0x01020304)
#define SPARES_A_SLOT 2u /* one that is written, one that others read: see buffers.c */
#define NONE          UINT32_MAX

enum segment_state { SEGMENT_INIT = 0, SEGMENT_READY = 1 };

/* What the layout follows from, and the policy; fixed at creation. No padding: it is compared and summed. */
struct geometry {
    uint32_t chunk_params, chunks, max_participants, snapshot_spares;
    uint32_t staging_buffers, optimizer, policy, ranks;
    uint32_t groups, tensors;
    uint64_t samples; /* UINT64_MAX: without end */
    uint64_t round_timeout_nanoseconds;
    pyps_policy_params policy_params;
    uint64_t plan, seed;
    uint64_t rounding_seed;
    uint32_t master;   /* PYPS_F32 or PYPS_BF16 */
    uint32_t averaged; /* 1: the last group is of averaged tensors */
};

_Static_assert(sizeof(pyps_policy_params) == 10 * 4 + 6 * 8, "no padding");

struct group {
    uint64_t elements;
    uint32_t first_chunk, chunks;
    uint32_t kind, reserved; /* PYPS_TRAINED ... */
};

/* The first page. Up to `checksum` nothing changes after READY. */
struct header {
    char magic[8];
    uint32_t endian, abi;
    uint64_t bytes;
    struct geometry geometry;
    uint32_t checksum; /* CRC-32 of geometry, tensors and groups */
    a32 state;
    int64_t clock_offset; /* of the creator's monotonic clock from the machine's: not 0 in a time namespace */
    uint64_t drawn;       /* at random: says which store an entry of a journal is of */
    _Alignas(64) a64 next_id;  /* participant ids */
    _Alignas(64) a64 view;     /* word {sequence, view buffer} */
    a32 view_waiters;          /* marks: wait.h */
    _Alignas(64) a32 progress; /* incremented when a chunk is published, if there are waiters */
    a32 progress_waiters;
};

/* What one participant shows to all others. Written by its owner, or by the holder of its lock byte. */
struct slot {
    _Alignas(64) a64 id; /* 0: no participant since the last reclaim */
    a64 chunk_hazard;    /* chunk buffer + 1 that it reads */
    a64 view_hazard;     /* view buffer + 1 that it reads */
    a64 ticket_hazard;   /* ticket whose staging buffer it reads */
    a64 residual_hazard; /* residual, named as in the view, that it reads */
    a64 process;         /* pid */
    a64 start_time;      /* of that pid, in clock ticks since boot */
    a64 pid_namespace;   /* inode */

    _Alignas(64) a64 waits; /* {since 56, kind 8}; this and the following words: activity.c */
    a64 waited, joined_at;  /* nanoseconds */
    a64 bytes_pushed, bytes_pulled;
};

/* Before every chunk buffer's floats. Written in private; does not change once published. */
struct chunk_header {
    double before;    /* steps that the chunk had taken when the view had counted none */
    double steps;     /* taken when this was written; a part of a global batch counts as one */
    pyps_hyper hyper; /* of the last step; zeros before the first one */
    uint32_t reserved;
};

_Static_assert(sizeof(struct chunk_header) == 64, "one cache line");

/* How a gradient lies in a staging buffer: in a codec, or as floats of which what is not finite counts as zero, its
 * whole block or it alone. STAGED_LOOKED: as STAGED_SKIP, but its owner has said that there is none. */
enum { STAGED_SKIP = PYPS_NF4 + 1, STAGED_ZERO, STAGED_LOOKED, STAGED_FORMS };

/* Before every staging buffer, followed by [groups] hyper constants. Does not change after admission, but for
 * `false_look`. Then come [chunks] words of clip_norm.c, which do too. Last come the ranges of which the gradient is. */
struct staging_header {
    float scale;
    uint32_t samples, codec; /* or STAGED_SKIP ... */
    a32 false_look;          /* 1: STAGED_LOOKED, and a participant found what is not finite: gradient.c */
    uint64_t position;       /* of hyper, in its schedule */
    uint64_t ranges;         /* how many; 0: it is of the whole flat vector */
    double weight;           /* in its round's mean */
    pyps_hyper hyper[];
};

#ifndef VIEWS_ALLOCATED
#define VIEWS_ALLOCATED 34u /* two, and two for each of sixteen participants in an event at one time */
#endif

struct layout {
    uint64_t tensors, groups, slots, words, saved, owners, view_owners, views, buffers, staging, residuals,
        bytes;
    uint64_t view_stride, buffer_stride, buffer_states, staging_stride, staging_sums, staging_data,
        staging_codes, staging_ranges, residual_stride;
    uint64_t most_ranges;                                      /* of a gradient */
    uint32_t buffer_count, view_count, states, common_buffers; /* common: of no slot */
    uint32_t views_allocated;                                  /* from the start */
};

/* PYPS_OK, or PYPS_EINVAL with the field that is out of range. */
int layout_compute(const struct geometry *geometry, struct layout *out);
uint32_t layout_crc32(const void *data, size_t bytes, uint32_t seed);

#endif
