// Command chartgen keeps the Helm chart and config/ one: what controller-gen writes to config/ goes into the chart, the chart's
// other templates, rendered with its default values, go to config/, and the table of its README is made from values.yaml.
package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
)

func main() {
	helm := flag.String("helm", "", "the program helm")
	chart := flag.String("chart", "", "directory of the chart")
	config := flag.String("config", "", "directory of the kustomizations")
	flag.Parse()
	if *helm == "" || *chart == "" || *config == "" || flag.NArg() > 0 {
		fail(fmt.Errorf("usage: chartgen --helm FILE --chart DIRECTORY --config DIRECTORY"))
	}
	// The chart renders what it is given: first the one, then the other.
	for _, step := range []func() error{
		func() error { return takeGenerated(*config, *chart) },
		func() error { return renderConfig(*helm, *chart, *config) },
		func() error { return documentValues(*chart) },
	} {
		if err := step(); err != nil {
			fail(err)
		}
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "chartgen:", err)
	os.Exit(1)
}

// takeGenerated copies what controller-gen has written into the chart's files, and removes CustomResourceDefinitions that are
// no more.
func takeGenerated(config, chart string) error {
	files := filepath.Join(chart, "files")
	if err := os.RemoveAll(filepath.Join(files, "crd")); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(files, "crd"), 0o755); err != nil {
		return err
	}
	crds, err := filepath.Glob(filepath.Join(config, "crd", "semmoe.io_*.yaml"))
	if err != nil {
		return err
	}
	copies := map[string]string{filepath.Join(config, "rbac", "role.yaml"): filepath.Join(files, "role.yaml")}
	for _, crd := range crds {
		copies[crd] = filepath.Join(files, "crd", filepath.Base(crd))
	}
	for from, to := range copies {
		text, err := os.ReadFile(from)
		if err != nil {
			return err
		}
		if err := os.WriteFile(to, text, 0o644); err != nil {
			return err
		}
	}
	return nil
}
