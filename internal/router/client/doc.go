// Package client is what the request router does for its clients' connections: it knows the routes that are for it, reads the bodies that they
// send, within limits of size and time, and ends answers of which they take nothing.
package client
