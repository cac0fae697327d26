#include <assert.h>
#include <stdint.h>
#include <stdlib.h>

typedef struct node {
	int64_t key;
	struct node *left, *right;
	int height;
} node;

static int height(const node *n) { return n ? n->height : 0; }

static void update(node *n)
{
	int l = height(n->left), r = height(n->right);
	n->height = 1 + (l > r ? l : r);
}

static node *rotate_right(node *y)
{
	node *x = y->left;
	y->left = x->right;
	x->right = y;
	update(y);
	update(x);
	return x;
}

static node *rotate_left(node *x)
{
	node *y = x->right;
	x->right = y->left;
	y->left = x;
	update(x);
	update(y);
	return y;
}

node *insert(node *n, int64_t key)
{
	if (n == NULL) {
		n = calloc(1, sizeof(*n));
		assert(n != NULL);
		n->key = key;
		n->height = 1;
		return n;
	}
	if (key < n->key)
		n->left = insert(n->left, key);
	else if (key > n->key)
		n->right = insert(n->right, key);
	update(n);
	int balance = height(n->left) - height(n->right);
	if (balance > 1)
		return rotate_right(n);
	if (balance < -1)
		return rotate_left(n);
	return n;
}
