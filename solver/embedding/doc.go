// Package embedding turns prompts into points, from the embeddings of their tokens, and parts points into clusters: requests
// told apart by what they are about, without any routing.
//
// Invariant: everything random takes a seed and gives the same result on every machine.
package embedding
