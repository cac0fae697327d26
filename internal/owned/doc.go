// Package owned holds what all objects of the operator have in common: labels, owner references, names from hashes.
package owned
