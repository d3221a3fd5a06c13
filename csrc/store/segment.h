/* segment.h: what segment.c, config.c and participant.c share: lock bytes and the tables fixed at creation.
 */
#ifndef PYPS_SEGMENT_H
#define PYPS_SEGMENT_H

#include "store/layout.h"

#define LOCK_BASE     (INT64_C(1) << 60) /* beyond any file; slot i's byte is i */
#define ATTACHED_BYTE INT64_C(4096)      /* read-locked by every handle */

int byte_lock(int fd, short type, int64_t byte); /* PYPS_OK, PYPS_EBUSY or PYPS_ESYS; never waits */
int byte_locked(int fd, int64_t byte);           /* by another open file description */

/* config.c: from what a creator asks for to geometry and tables (malloced; the caller frees), all checked. */
#define MOST_RANKS UINT32_C(1000000) /* of a core in virtual time; a store's have to be participants */

int config_read(const pyps_config *given, pyps_config *config); /* with what an older caller lacks */
int config_check_ranks(const pyps_config *config);              /* and batches, and the round timeout */
uint64_t config_round_timeout(const pyps_config *config);       /* nanoseconds */
int config_geometry(const pyps_config *config, struct geometry *geometry, pyps_tensor **tensors,
                    struct group **groups);
uint32_t segment_checksum(const struct geometry *geometry, const pyps_tensor *tensors,
                          const struct group *groups);
int tables_valid(const struct geometry *geometry, const pyps_tensor *tensors, const struct group *groups);

#endif
