// SPDX-License-Identifier: Apache-2.0

package clientauth

import "context"

type clientKey struct{}

// WithClient returns a context of a request of a known client.
func WithClient(ctx context.Context, name string) context.Context {
	return context.WithValue(ctx, clientKey{}, name)
}

// ClientOf returns the name of the client that sent a request; empty if it is not known.
func ClientOf(ctx context.Context) string {
	name, _ := ctx.Value(clientKey{}).(string)
	return name
}
