// SPDX-License-Identifier: Apache-2.0

// Package prompts maps prompts to points, based on the embeddings of their tokens, and divides points into clusters:
// requests are distinguished by topic, without routing data. Start reading at Mean and KMeans.
//
// Invariant: all random functions take a seed and return the same result on every machine.
package prompts
