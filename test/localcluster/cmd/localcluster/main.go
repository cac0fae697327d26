// SPDX-License-Identifier: Apache-2.0

// Command localcluster starts a local Kubernetes cluster, prints the KUBECONFIG setting for it, and stops the cluster
// on Ctrl-C.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/semmoe/operator/test/localcluster"
)

func main() {
	localcluster.RunChildIfAsked()
	o := localcluster.Options{Images: map[string]string{}, Log: os.Stderr}
	flag.StringVar(&o.Binaries, "binaries", "", "directory of the Kubernetes programs (default: the build of this repository)")
	flag.StringVar(&o.Dir, "dir", "", "state directory, kept at the end (default: a temporary one)")
	flag.IntVar(&o.GPUs, "gpus", 64, "number of nvidia.com/gpu that the node advertises")
	flag.Func("image", "REFERENCE=PATH: an image and its static binary; can be repeated", func(s string) error {
		// An image reference cannot contain "=", a path can.
		reference, path, ok := strings.Cut(s, "=")
		if !ok {
			return fmt.Errorf("want REFERENCE=PATH")
		}
		var err error
		o.Images[reference], err = filepath.Abs(path)
		return err
	})
	flag.Parse()
	if err := run(o); err != nil {
		fmt.Fprintf(os.Stderr, "localcluster: %v\n", err)
		os.Exit(1)
	}
}

func run(o localcluster.Options) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if o.Binaries == "" {
		var err error
		if o.Binaries, err = localcluster.FindBinaries(); err != nil {
			return err
		}
	}
	cluster, err := localcluster.Start(ctx, o)
	if err != nil {
		return err
	}
	fmt.Printf("export KUBECONFIG=%s\n", cluster.Kubeconfig())
	<-cluster.Done()
	return cluster.Stop()
}
