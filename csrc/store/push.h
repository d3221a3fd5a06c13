/* push.h: a gradient comes in. */
#ifndef PYPS_PUSH_H
#define PYPS_PUSH_H

#include "store/participants.h"

/* finite.c */
/* What finite_check is to find finite: values from the chunk `first` on, but for the parts that the caller has looked
 * at. */
struct unseen {
    const float *values;
    uint32_t first;
    const pyps_range *looked;
    uint64_t looked_count;
};
/* PYPS_OK, or PYPS_ENONFINITE. Copies the gradient meanwhile, unless `to` is NULL. */
int finite_check(pyps_store *s, const struct unseen *unseen, float *to);
/* The same of ranges, which lie at their places, or packed one after the other. */
int finite_check_ranges(const pyps_store *s, const float *values, bool packed, const pyps_range *ranges,
                        uint64_t count);
/* The same of codes that have no scales: halves, which may be NaN themselves. Chunks seen whole are not read. */
int finite_check_halves(const pyps_store *s, uint32_t staging, uint32_t codec, const struct unseen *unseen);

/* fill.c */
/* Writes all that apply reads into the staging buffer. Nothing has happened until `e` is committed. */
int staging_fill(pyps_store *s, const pyps_push_args *args, struct event *e, pyps_push_result *out);

#endif
