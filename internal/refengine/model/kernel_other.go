// SPDX-License-Identifier: Apache-2.0

//go:build !amd64

package model

// useAVX is a variable only so that tests can set it on every platform.
var useAVX = false

func runBlockAVX(c *block) { runBlockGeneric(c) }
