// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

func TestPullPolicy(t *testing.T) {
	for _, text := range []string{"", "Always", "IfNotPresent", "Never"} {
		if got, err := pullPolicy(text); err != nil || got != corev1.PullPolicy(text) {
			t.Errorf("%q: %q, %v", text, got, err)
		}
	}
	root := newRootCommand()
	root.SetArgs([]string{"manager", "--image-pull-policy", "always"})
	root.SetOut(io.Discard)
	if err := root.ExecuteContext(t.Context()); err == nil || !strings.Contains(err.Error(), `--image-pull-policy "always": must be Always, IfNotPresent or Never`) {
		t.Errorf("invalid policy: %v", err)
	}
}
