// SPDX-License-Identifier: Apache-2.0

package httpserver

import (
	"context"
	"testing"
)

func TestRunning(t *testing.T) {
	var running running
	end := running.begin()
	ctx, cancel := context.WithCancel(t.Context())
	idle := make(chan bool, 1)
	go func() { idle <- running.idle(ctx) }()
	cancel()
	if <-idle {
		t.Error("idle while a request runs")
	}
	end()
	if !running.idle(t.Context()) {
		t.Error("not idle after the last request")
	}
}
