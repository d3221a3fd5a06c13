/* pull.h: parameters go out. */
#ifndef PYPS_PULL_H
#define PYPS_PULL_H

#include "store/push.h"

/* pull.c */
int pull_record(pyps_store *s, uint64_t version); /* in the view */
/* Copies every chunk but those that an exchange's ticket was streamed with (0: none). *version_out: the oldest. */
int chunks_copy(pyps_store *s, float *flat, uint64_t ticket, uint64_t *version_out);

#endif
