/* error.h: a negative code for programs and a message for people, both set where the error is found; and the checks of
 * pointers and structs that every public function makes. */
#ifndef PYPS_ERROR_H
#define PYPS_ERROR_H

#include <stddef.h>
#include <stdint.h>

/* Sets this thread's message and returns `code`, so that a failure reads `return fail(PYPS_EINVAL, ...)`. */
int pyps__fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3), cold));
#define fail(...) pyps__fail(__VA_ARGS__)
/* PYPS_OK, or PYPS_EINVAL: a pointer that must not be NULL is. */
int pyps__require(const void *pointer, const char *argument);
#define require(pointer) pyps__require(pointer, #pointer)
/* PYPS_OK, or PYPS_EINVAL: a number is not one of `low` to `high`. */
int pyps__between(const char *field, uint64_t found, uint64_t low, uint64_t high);
/* Copies a caller's struct that begins with its size, of at least `least` bytes, to one of `known`: see "Structs" in
 * pyps.h. */
int pyps__read_struct(const char *what, const void *from, size_t least, void *to, size_t known);
#define read_struct(what, from, last, to)                                                                    \
    pyps__read_struct(what, from, offsetof(__typeof__(*(to)), last) + sizeof((to)->last), to, sizeof *(to))

#endif
