/* apply.h: a ticket becomes the next parameters. */
#ifndef PYPS_APPLY_H
#define PYPS_APPLY_H

#include "store/gradients.h"

/* arrivals.c */
struct arrivals {
    pyps_arrival arrived;
    void *context;
    uint64_t least;       /* floats of a run that is told, but for the last one */
    uint32_t there, told; /* chunks from the first one on */
    int refused;          /* what `arrived` returned, if not 0: nothing more is told */
};
void arrivals_begin(pyps_store *s, struct arrivals *a); /* nothing is streamed so far */
void chunk_arrived(const pyps_store *s, uint32_t chunk, uint64_t ticket);
bool has_arrived(const pyps_store *s, uint32_t chunk, uint64_t ticket);
void arrivals_tell(pyps_store *s); /* of what there is since the last time, in the caller's thread */
int arrivals_end(pyps_store *s, bool whole); /* all is there if `whole`; what `arrived` refused with */

/* apply.c */
/* Applies the tickets that the chunk lacks, up to `version`. */
int chunk_advance(pyps_store *s, uint32_t chunk, uint64_t version);
/* The same of a part of the chunks: every `parts`th, from `part` on. */
int chunks_advance_part(pyps_store *s, uint64_t version, uint32_t part, uint32_t parts);
/* Brings every chunk to `version`, behind participants that are already at it. `own`: a ticket that no other
 * participant is expected to apply, or 0. */
int chunks_follow(pyps_store *s, uint64_t version, uint64_t own);
int chunks_complete(pyps_store *s, uint64_t version); /* the same, at once if it has been seen before */

#endif
