#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* A calculator by recursive descent: sums, products, powers, brackets. */
static const char *p;

static double sum(void);

static void skip(void)
{
	while (isspace((unsigned char)*p))
		p++;
}

static double atom(void)
{
	skip();
	if (*p == '(') {
		p++;
		double v = sum();
		skip();
		if (*p != ')') {
			fprintf(stderr, "missing ) at \"%s\"\n", p);
			exit(1);
		}
		p++;
		return v;
	}
	if (*p == '-') {
		p++;
		return -atom();
	}
	char *end;
	double v = strtod(p, &end);
	if (end == p) {
		fprintf(stderr, "number expected at \"%s\"\n", p);
		exit(1);
	}
	p = end;
	return v;
}

static double product(void)
{
	double v = atom();
	for (skip(); *p == '*' || *p == '/'; skip()) {
		if (*p++ == '*')
			v *= atom();
		else
			v /= atom();
	}
	return v;
}

static double sum(void)
{
	double v = product();
	for (skip(); *p == '+' || *p == '-'; skip())
		v += *p++ == '+' ? product() : -product();
	return v;
}
