// SPDX-License-Identifier: Apache-2.0

// Command kubectl-semmoe is the kubectl plugin "kubectl semmoe": see docs/kubectl.md.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/semmoe/operator/internal/kubectl"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := kubectl.Main(ctx, os.Args, os.Stdout, os.Stderr, os.Getenv)
	stop()
	os.Exit(code)
}
