// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spf13/cobra"
)

// TestEndAfterSignal checks that a signal ends a command that waits for something unavailable, such as the file of a
// flag, within two seconds, also one that would drain requests later. A command that drains is awaited.
func TestEndAfterSignal(t *testing.T) {
	for name, drains := range map[string]bool{"waits": false, "drains": true} {
		synctest.Test(t, func(t *testing.T) {
			ctx, signal := context.WithCancel(t.Context())
			drained := make(chan struct{})
			root := &cobra.Command{SilenceErrors: true, SilenceUsage: true, RunE: func(cmd *cobra.Command, _ []string) error {
				if drains {
					Drains(cmd.Context())
				}
				signal()
				<-drained
				return nil
			}}
			ended := make(chan error, 1)
			go func() { ended <- execute(ctx, root, nil) }()
			if !drains {
				begin := time.Now()
				if err, took := <-ended, time.Since(begin); err == nil || took > 2*time.Second {
					t.Errorf("%s: the command ended after %v: %v", name, took, err)
				}
				close(drained)
				return
			}
			<-ctx.Done()
			time.AfterFunc(endGrace*4/3, func() { close(drained) })
			if err := <-ended; err != nil {
				t.Errorf("%s: the draining command ended with %v", name, err)
			}
		})
	}
}
