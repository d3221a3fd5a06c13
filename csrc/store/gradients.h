/* gradients.h: what lies in a staging buffer, and how it gets there. */
#ifndef PYPS_GRADIENTS_H
#define PYPS_GRADIENTS_H

#include "store/buffers.h"

/* ranges.c */
struct run {
    uint64_t first, end; /* floats of the flat vector */
};
/* That they are in ascending order, apart, and in the flat vector. */
int ranges_check(const pyps_store *s, const char *what, const pyps_range *ranges, uint64_t count);
/* The next floats from `at` on, and before `end`, that are in one of them. False: there are none. */
bool ranges_next(const pyps_range *ranges, uint64_t count, uint64_t at, uint64_t end, struct run *run);
/* Gives the ranges of a flat vector in this slot's staging memory, and puts values there that lie one after the other;
 * NULL: none. */
int ranges_place(pyps_store *s, float *part, const float *values, const pyps_range *ranges, uint64_t count);
/* Says in a staging buffer of which ranges its gradient is; none: of all. */
int ranges_stage(pyps_store *s, uint32_t staging, const pyps_range *ranges, uint64_t count);
bool staging_has(const pyps_store *s, uint32_t slot, uint32_t staging, uint64_t at); /* this float */
/* Of the ticket that was loaded last: whether one of its gradients is of ranges, so that runs begin anywhere, and the
 * next floats that the same of its gradients have, as in ranges_next. */
bool ticket_is_ranged(const pyps_store *s);
bool ticket_next_run(const pyps_store *s, uint64_t at, uint64_t end, struct run *run);

/* gradient.c */
uint32_t staging_codec(const pyps_store *s, uint32_t slot, uint32_t staging); /* or STAGED_SKIP ... */
/* `length` floats from `at` of a staged gradient: in place, or unless it is PYPS_F32 maybe in `block`. */
const float *staging_gradient(const pyps_store *s, uint32_t slot, uint32_t staging, uint32_t codec,
                              uint64_t at, size_t length, float *block);
/* Of this worker's gradient, when every chunk has its ticket: PYPS_EFALSELOOK, or PYPS_OK. */
int falsely_looked(const pyps_store *s, uint32_t staging);
/* Of the ticket that was loaded last: where its constants are, and `length` floats of its gradient from `at` of the
 * flat vector, in place or in `block`. A round's mean is scaled; a push's gradient is not. */
const struct staging_header *ticket_constants(const pyps_store *s);
const float *ticket_gradient(const pyps_store *s, uint64_t at, size_t length, float *block);

/* clip_norm.c */
/* Forgets the sums of squares in a staging buffer that is not admitted yet. */
void norm_reset(const pyps_store *s, uint32_t staging);
/* The same, and sums the gradient of a push that is applied alone. *finite_out: it has no value that is not finite. */
void norm_of_push(pyps_store *s, uint32_t staging, bool *finite_out);
/* Sets s->norm for the ticket that was loaded last. Its hazard is set, and a chunk lacks it. */
void norm_of_ticket(pyps_store *s);
/* What the gradient is multiplied by so that its norm, s->norm, keeps within `clip_norm`. */
float norm_factor(double norm, float clip_norm);

/* averaged.c */
/* Fills step->new from step->old and what the workers have, for a run of an averaged chunk's floats from `at` of the
 * flat vector. */
void averaged_step(const pyps_store *s, const struct step *step, float lr, uint64_t at);

/* look.c */
/* A chunk's values to their place in a flat vector. */
void chunk_put(const pyps_store *s, uint32_t chunk, const float *from, float *flat);
/* The same of a vector of its buffer; zeros if it has no such one. */
void chunk_copy(const pyps_store *s, uint32_t chunk, uint32_t buffer, uint32_t vector, float *flat);
/* All its parameters, in place or in s->chunk_floats. NULL: PYPS_ENOSPC, message set. */
const float *chunk_params(pyps_store *s, uint32_t chunk, uint32_t buffer);
int lookahead_set(pyps_store *s); /* s->lookahead, from the present view */
/* As chunk_copy and chunk_params do, s->lookahead further on; and a run of the chunk, without its unused end. */
void chunk_look(const pyps_store *s, uint32_t chunk, uint32_t buffer, float *flat);
const float *chunk_params_ahead(pyps_store *s, uint32_t chunk, uint32_t buffer);
void chunk_look_run(const pyps_store *s, uint32_t chunk, uint32_t buffer, struct run run, float *to);

/* staging.c */
int staging_check(pyps_store *s, uint32_t staging);    /* that it is one of this worker's */
int staging_allocate(pyps_store *s, uint32_t staging); /* memory for a whole gradient */
int staging_allocate_codes(pyps_store *s, uint32_t staging, uint64_t bytes);
int staging_allocate_averaged(pyps_store *s,
                              uint32_t staging); /* averaged tensors, which are never encoded */
int residual_allocate(pyps_store *s, uint32_t name);
void staging_give_back(pyps_store *s); /* all but headers, of buffers that no process reads */
/* Gives up the current step: takes back every staging buffer but those that wait in a round. */
void staging_abandon(pyps_store *s);
/* Of a push that timed out in a round: no call will wait for that round. */
void staging_park(pyps_store *s);

/* encoded.c */
/* Encodes one chunk, whose parameters are `values`; everything else in `flat` is of the whole vector. */
int chunk_encode(const pyps_store *s, uint32_t chunk, const float *values, struct encoding *flat);
/* Encodes args->gradient, or what is in the staging buffer, into its codes; with error_feedback `e` names the residuals
 * from then on. */
int staging_encode(pyps_store *s, const pyps_push_args *args, struct event *e, pyps_push_result *out);

#endif
