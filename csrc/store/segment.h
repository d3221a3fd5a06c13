/* segment.h: the file of a segment: its lock bytes (handle.c), and the tables fixed at creation (geometry.c). */
#ifndef PYPS_SEGMENT_H
#define PYPS_SEGMENT_H

#include "store/layout.h"

#define LOCK_BASE     (INT64_C(1) << 60) /* beyond any file; slot i's byte is i */
#define ATTACHED_BYTE INT64_C(4096)      /* read-locked by every handle */
#define REMOVER_BYTE  INT64_C(4097)      /* write-locked while a name is removed */

/* handle.c */
int segment_lock_byte(int fd, short type, int64_t byte); /* PYPS_OK, PYPS_EBUSY or PYPS_ESYS; never waits */
const char *segment_directory(void);                     /* that holds segments */
int segment_byte_locked(int fd, int64_t byte);           /* by another open file description */

/* No fork may happen between opening or mapping a file and saying so where a forked child looks. */
void segment_hold_forks(void);
void segment_release_forks(void);

/* geometry.c */
/* Geometry and tables from what a creator asks for, all checked. The caller frees the tables. */
int geometry_from_config(const pyps_config *given, struct geometry *geometry, pyps_tensor **tensors,
                         struct group **groups);
uint32_t geometry_checksum(const struct geometry *geometry, const pyps_tensor *tensors,
                           const struct group *groups);
int geometry_tables_valid(const struct geometry *geometry, const pyps_tensor *tensors,
                          const struct group *groups);

#endif
