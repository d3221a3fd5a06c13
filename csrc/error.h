/* error.h: a negative code for programs and a message for people, both set where the error is found. */
#ifndef PYPS_ERROR_H
#define PYPS_ERROR_H

/* Sets this thread's message and returns `code`, so that a failure reads `return fail(PYPS_EINVAL, ...)`. */
int pyps__fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3), cold));
#define fail(...) pyps__fail(__VA_ARGS__)
/* PYPS_OK, or PYPS_EINVAL: a pointer that must not be NULL is. */
int pyps__given(const void *pointer, const char *argument);
#define given(pointer) pyps__given(pointer, #pointer)

#endif
