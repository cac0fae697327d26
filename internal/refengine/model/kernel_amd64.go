package model

import "golang.org/x/sys/cpu"

// useAVX picks the kernel; both give the same bits.
var useAVX = cpu.X86.HasAVX

//go:noescape
func runBlockAVX(c *block)
