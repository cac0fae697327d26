// SPDX-License-Identifier: Apache-2.0

// Package embedding contains vectors of token ids, by which tokens are similar.
package embedding

// Table contains a vector for each token id.
type Table struct {
	// Tokens and Size are the shape.
	Tokens, Size int
	// Values are the vectors [tokens × size].
	Values []float32
}

// Vector returns the vector of a token id.
func (t *Table) Vector(id int32) []float32 { return t.Values[int(id)*t.Size : (int(id)+1)*t.Size] }
