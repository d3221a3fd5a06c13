/* segment.h: a segment's file, the handles on it in this process, and what lies where in it. */
#ifndef PYPS_SEGMENT_H
#define PYPS_SEGMENT_H

#include "store/store.h"

#define LOCK_BASE     (INT64_C(1) << 60) /* beyond any file; slot i's byte is i */
#define ATTACHED_BYTE INT64_C(4096)      /* read-locked by every handle */
#define REMOVER_BYTE  INT64_C(4097)      /* write-locked while a name is removed */

/* activity.c: shows others what this participant does. `slept`: nanoseconds; `kind`: PYPS_WAITS_START ... */
void activity_joined(pyps_store *s);
void activity_waits(pyps_store *s, uint32_t kind, uint64_t since);
void activity_goes_on(pyps_store *s, uint64_t slept);
uint64_t activity_bytes(const pyps_store *s,
                        uint32_t codec); /* of a whole gradient, or all parameters: no padding */
void activity_pushed(pyps_store *s, uint64_t bytes);
void activity_pulled(pyps_store *s, uint64_t bytes);
void activity_show(const pyps_store *s, uint32_t index, const struct member *m, pyps_member *out);

/* geometry.c */
/* Geometry and tables from what a creator asks for, all checked. The caller frees the tables. */
int geometry_from_config(const pyps_config *given, struct geometry *geometry, pyps_tensor **tensors,
                         struct group **groups);
uint32_t geometry_checksum(const struct geometry *geometry, const pyps_tensor *tensors,
                           const struct group *groups);
int geometry_tables_valid(const struct geometry *geometry, const pyps_tensor *tensors,
                          const struct group *groups);

/* handle.c */
int segment_lock_byte(int fd, short type, int64_t byte); /* PYPS_OK, PYPS_EBUSY or PYPS_ESYS; never waits */
const char *segment_directory(void);                     /* that holds segments */
int segment_byte_locked(int fd, int64_t byte);           /* by another open file description */

/* No fork may happen between opening or mapping a file and saying so where a forked child looks. */
void segment_hold_forks(void);
void segment_release_forks(void);

int store_check_usable(pyps_store *s, bool joined); /* PYPS_OK, PYPS_EFORKED or PYPS_EINVAL */
int store_check_worker(pyps_store *s);              /* the same, and that it has joined as a worker */
uint64_t store_deadline(const pyps_store *s, double timeout_seconds); /* of a timeout as in pyps.h */
int store_check_interrupt(void);
struct file file_behind(int fd);
bool file_is_behind(int fd, struct file file);
/* Unless this process has closed it, and maybe opened another one. */
void file_close(int fd, struct file file);
/* Zeros, at an address that no handle has had: a second close cannot be another's. With forks held; NULL: no memory. */
pyps_store *handle_allocate(void);
void handle_free(pyps_store *s); /* its memory; the address stays taken */
void handle_list(pyps_store *s); /* with forks held */
/* Closes its files, and takes it from the list: in one step, or a child forked between would keep the files' locks.
 * False: it was not there. */
bool handle_end(pyps_store *s);
bool handle_is_listed(const pyps_store *s);
void journal_close(pyps_store *s);
void reading_drop(pyps_store *s); /* frees what pyps_state_begin gave; the view is not changed */

/* mapping.c */
int mapping_make(pyps_store *s);
/* Makes this slot's staging buffers private memory of this process, before another worker gets them. */
int mapping_detach_staging(pyps_store *s);
int mapping_renew(pyps_store *s); /* before the handle joins again */
void mapping_end(pyps_store *s);
/* Says on which nodes the first `bytes` of the file get their memory, if PYPS_NUMA does. */
int mapping_spread(const pyps_store *s, uint64_t bytes);
/* Gives a hole of the file memory, as whole huge pages where the system has such ones; PYPS_ENOSPC. */
int segment_allocate(pyps_store *s, uint64_t offset, uint64_t bytes);
/* Makes whole pages of the file holes again, where the file system can. */
void segment_release(pyps_store *s, uint64_t offset, uint64_t bytes);

/* places.c */
/* 0: parameters, if they are floats, 1..: states. Averaged chunks have none. */
float *buffer_floats(const pyps_store *s, uint32_t buffer, uint32_t vector);
uint8_t *buffer_halves(const pyps_store *s, uint32_t buffer); /* parameters, if they are bf16 */
/* `length` parameters from `first` of the chunk: in place, or if they are bf16 in `block`. */
const float *buffer_params(const pyps_store *s, uint32_t chunk, uint32_t buffer, uint32_t first,
                           size_t length, float *block);
struct chunk_header *buffer_header(const pyps_store *s, uint32_t buffer);
struct staging_header *staging_header(const pyps_store *s, uint32_t slot, uint32_t staging);
float *staging_data(const pyps_store *s, uint32_t slot, uint32_t staging);
uint8_t *staging_codes(const pyps_store *s, uint32_t slot, uint32_t staging);
float *staging_scales(const pyps_store *s, uint32_t slot, uint32_t staging, uint32_t codec);
float *residual_at(const pyps_store *s, uint32_t name); /* of a name within the view's bounds */

/* crew.c */
/* Takes chunks by next32_relaxed(next) until none is left, and does its part for each. Doing all again changes nothing. */
typedef int crew_job(pyps_store *hand, a32 *next, const void *what);
/* Lets the crew take part in a job of so many chunks. Every chunk is done, or the error is the caller's own. */
int crew_work(pyps_store *s, uint32_t chunks, crew_job *job, const void *what);
/* One thread more, whose slot `take_slot` finds. */
int crew_add(pyps_store *s, int (*take_slot)(pyps_store *), void (*leave_slot)(pyps_store *));
uint32_t crew_threads(const pyps_store *s);                     /* with the caller's */
void crew_end(pyps_store *s, void (*leave_slot)(pyps_store *)); /* NULL: the segment is not touched */

#endif
