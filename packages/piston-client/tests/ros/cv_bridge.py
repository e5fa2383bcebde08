class CvBridge:
    def imgmsg_to_cv2(self, message, desired_encoding):
        assert desired_encoding == "rgb8"
        return message.pixels
