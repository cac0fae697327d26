#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	size_t lines = 0, words = 0;
	struct stat st;

	if (argc != 2) {
		fprintf(stderr, "usage: %s FILE\n", argv[0]);
		return EXIT_FAILURE;
	}
	int fd = open(argv[1], O_RDONLY | O_CLOEXEC);
	if (fd < 0 || fstat(fd, &st) < 0) {
		perror(argv[1]);
		return EXIT_FAILURE;
	}
	if (st.st_size == 0) {
		printf("0 0 0 %s\n", argv[1]);
		return EXIT_SUCCESS;
	}
	const char *text = mmap(NULL, st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
	if (text == MAP_FAILED) {
		perror("mmap");
		return EXIT_FAILURE;
	}
	int inside = 0;
	for (off_t i = 0; i < st.st_size; i++) {
		int space = text[i] == ' ' || text[i] == '\n' || text[i] == '\t';
		lines += text[i] == '\n';
		words += !space && !inside;
		inside = !space;
	}
	printf("%zu %zu %lld %s\n", lines, words, (long long)st.st_size, argv[1]);
	munmap((void *)text, st.st_size);
	close(fd);
	return EXIT_SUCCESS;
}
