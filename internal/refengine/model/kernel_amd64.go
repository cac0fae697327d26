// SPDX-License-Identifier: Apache-2.0

package model

import "golang.org/x/sys/cpu"

// useAVX selects the kernel. Both kernels give bitwise equal results.
var useAVX = cpu.X86.HasAVX

//go:noescape
func runBlockAVX(c *block)
