#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

struct ring {
	unsigned char *data;
	size_t capacity;
	size_t head;
	size_t length;
};

bool ring_init(struct ring *r, size_t capacity)
{
	r->data = malloc(capacity);
	r->capacity = capacity;
	r->head = r->length = 0;
	return r->data != NULL;
}

size_t ring_write(struct ring *r, const void *buf, size_t n)
{
	const unsigned char *bytes = buf;
	size_t room = r->capacity - r->length;

	if (n > room)
		n = room;
	for (size_t i = 0; i < n; i++)
		r->data[(r->head + r->length + i) % r->capacity] = bytes[i];
	r->length += n;
	return n;
}

size_t ring_read(struct ring *r, void *buf, size_t n)
{
	unsigned char *bytes = buf;

	if (n > r->length)
		n = r->length;
	for (size_t i = 0; i < n; i++)
		bytes[i] = r->data[(r->head + i) % r->capacity];
	r->head = (r->head + n) % r->capacity;
	r->length -= n;
	return n;
}
