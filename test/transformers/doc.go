// SPDX-License-Identifier: Apache-2.0

// Package transformers tests the backend Transformers of semmoe profile with PyTorch and Hugging Face transformers on
// CPUs.
package transformers
