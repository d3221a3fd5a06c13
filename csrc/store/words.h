/* words.h: the packed 64-bit words that change by one CAS.
 *
 *   word   {version 40, buffer 24}              the buffer of a chunk, and its version
 *   owner  {generation 32, holder 10, chunk 22} the participant that holds a buffer, and for which chunk
 *   saved  {snapshot 38, state 2, buffer 24}    what a strict snapshot has of a chunk
 *
 * A version never repeats, so a word never repeats. A generation counts the claims of one buffer. To take one
 * generation for another, a process would have to stop between its scan and its CAS for exactly 2^32 claims
 * of that buffer, each at least one pass over a chunk.
 */
#ifndef PYPS_WORDS_H
#define PYPS_WORDS_H

#include <stdint.h>

#define WORD_BUFFER_BITS  24
#define WORD_BUFFER_MASK  ((UINT64_C(1) << WORD_BUFFER_BITS) - 1)
#define OWNER_CHUNK_BITS  22
#define OWNER_CHUNK_NONE  ((UINT32_C(1) << OWNER_CHUNK_BITS) - 1)
#define OWNER_HOLDER_BITS 10
#define HOLDER_NONE       0u                                       /* published or free */
#define HOLDER_ABSENT     ((UINT32_C(1) << OWNER_HOLDER_BITS) - 1) /* memory not allocated yet */
#define MAX_PARTICIPANTS  1000u                                    /* holder = slot + 1 < HOLDER_ABSENT */

_Static_assert(MAX_PARTICIPANTS + 1 < HOLDER_ABSENT, "every slot needs a holder number");

static inline uint64_t word_make(uint64_t version, uint32_t buffer) {
    return version << WORD_BUFFER_BITS | buffer;
}
static inline uint64_t word_version(uint64_t word) { return word >> WORD_BUFFER_BITS; }
static inline uint32_t word_buffer(uint64_t word) { return (uint32_t)(word & WORD_BUFFER_MASK); }

static inline uint64_t owner_make(uint32_t generation, uint32_t holder, uint32_t chunk) {
    return (uint64_t)generation << 32 | holder << OWNER_CHUNK_BITS | chunk;
}
static inline uint32_t owner_generation(uint64_t owner) { return (uint32_t)(owner >> 32); }
static inline uint32_t owner_holder(uint64_t owner) { return (uint32_t)owner >> OWNER_CHUNK_BITS; }
static inline uint32_t owner_chunk(uint64_t owner) { return (uint32_t)owner & OWNER_CHUNK_NONE; }

enum saved_state { SAVED_NONE = 0, SAVED_BUFFER = 1, SAVED_DONE = 2 };

static inline uint64_t saved_make(uint64_t snapshot, enum saved_state state, uint32_t buffer) {
    return snapshot << (WORD_BUFFER_BITS + 2) | (uint64_t)state << WORD_BUFFER_BITS | buffer;
}
static inline uint64_t saved_snapshot(uint64_t saved) { return saved >> (WORD_BUFFER_BITS + 2); }
static inline enum saved_state saved_state(uint64_t saved) {
    return (enum saved_state)(saved >> WORD_BUFFER_BITS & 3);
}

#endif
