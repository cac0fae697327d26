#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* Connects to a host by name and returns a descriptor, or -1 with errno set. */
int dial(const char *host, const char *service)
{
	struct addrinfo hints, *list, *ai;
	int fd = -1, err;

	memset(&hints, 0, sizeof(hints));
	hints.ai_family = AF_UNSPEC;
	hints.ai_socktype = SOCK_STREAM;
	err = getaddrinfo(host, service, &hints, &list);
	if (err != 0) {
		fprintf(stderr, "%s: %s\n", host, gai_strerror(err));
		errno = EHOSTUNREACH;
		return -1;
	}
	for (ai = list; ai != NULL; ai = ai->ai_next) {
		fd = socket(ai->ai_family, ai->ai_socktype, ai->ai_protocol);
		if (fd < 0)
			continue;
		if (connect(fd, ai->ai_addr, ai->ai_addrlen) == 0)
			break;
		close(fd);
		fd = -1;
	}
	freeaddrinfo(list);
	return fd;
}
