// SPDX-License-Identifier: Apache-2.0

// Mkimage builds a container image with one static program, and writes the image as a tar that containerd, podman and
// docker can load. In internal/tools:
//
//	go run ./image/cmd/mkimage --binary dist/semmoe --name semmoe:dev --out dist/semmoe.tar
//
// It prints the digest of the manifest of the image. The same program and name give the same bytes.
package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/semmoe/operator/internal/tools/image"
)

func main() {
	if err := run(os.Args[1:], os.Stdout, os.Stderr); err != nil {
		if !errors.Is(err, flag.ErrHelp) {
			fmt.Fprintln(os.Stderr, "mkimage:", err)
		}
		os.Exit(1)
	}
}

func run(arguments []string, stdout, stderr io.Writer) error {
	flags := flag.NewFlagSet("mkimage", flag.ContinueOnError)
	flags.SetOutput(stderr)
	binary := flags.String("binary", "", "path of the static program; its base name is the entrypoint of the image")
	name := flags.String("name", "", "name of the image, [DOMAIN/]REPOSITORY:TAG")
	out := flags.String("out", "", "path of the tar file to write")
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	for _, option := range []struct{ name, value string }{{"binary", *binary}, {"name", *name}, {"out", *out}} {
		if option.value == "" {
			return fmt.Errorf("--%s is missing; usage: mkimage --binary FILE --name NAME:TAG --out FILE", option.name)
		}
	}
	content, err := os.ReadFile(*binary)
	if err != nil {
		return fmt.Errorf("--binary: %w", err)
	}
	var layout bytes.Buffer
	digest, err := image.Build(&layout, image.Options{Name: *name, Program: filepath.Base(*binary), Binary: content})
	if err != nil {
		return err
	}
	// A reader of --out sees the old image or the new one, never a part.
	part := *out + ".part"
	if err := errors.Join(os.WriteFile(part, layout.Bytes(), 0o644), os.Rename(part, *out)); err != nil {
		return fmt.Errorf("--out: %w", err)
	}
	_, err = fmt.Fprintln(stdout, digest)
	return err
}
